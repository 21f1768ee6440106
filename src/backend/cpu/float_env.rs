//! The floating-point control word. A host may have set flush-to-zero or another rounding mode, audio code often does;
//! the same bits on every thread and every machine need the defaults. A guard sets them and puts the host's back.
#![allow(unsafe_code)]

/// The defaults for as long as it lives.
pub(super) struct FloatEnv(arch::Word);

impl FloatEnv {
    /// Sets the defaults: round to nearest even, subnormals kept, exceptions masked.
    pub(super) fn enter() -> Self {
        let before = arch::read();
        // Writing costs more than reading, and nearly always there is nothing to write.
        if before & arch::CONTROL != arch::DEFAULT {
            arch::write(arch::DEFAULT);
        }
        FloatEnv(before)
    }
}

impl Drop for FloatEnv {
    fn drop(&mut self) {
        if self.0 & arch::CONTROL != arch::DEFAULT {
            arch::write(self.0);
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod arch {
    use core::arch::asm;

    pub(super) type Word = u32;
    /// All but the six sticky exception flags.
    pub(super) const CONTROL: Word = 0xffc0;
    pub(super) const DEFAULT: Word = 0x1f80;

    pub(super) fn read() -> Word {
        let mut word: Word = 0;
        // SAFETY: writes four bytes to `word`. SSE is part of x86-64.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut word, options(nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: Word) {
        // SAFETY: reads four bytes; the word is the default or one that `read` returned, so no reserved bit is set.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &word, options(nostack, preserves_flags)) };
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod arch {
    use core::arch::asm;

    pub(super) type Word = u64;
    /// AHP, DN, FZ, RMode, FZ16, the trap enables, NEP, AH and FIZ.
    pub(super) const CONTROL: Word = 0x07c8_9f07;
    pub(super) const DEFAULT: Word = 0;

    pub(super) fn read() -> Word {
        let word: Word;
        // SAFETY: reads a register that user code may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: Word) {
        // SAFETY: writes zero or what `read` returned.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags)) };
    }
}

#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
mod arch {
    pub(super) type Word = u32;
    pub(super) const CONTROL: Word = 0;
    pub(super) const DEFAULT: Word = 0;

    pub(super) fn read() -> Word {
        0
    }

    pub(super) fn write(_: Word) {}
}

#[cfg(all(test, target_arch = "x86_64", not(miri)))]
mod tests {
    use super::super::pool::Pool;
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn subnormals_survive_a_host_that_flushes_them() {
        let before = arch::read();
        // Workers started under the host's word, too.
        arch::write(0x9fc0);
        let pool = Pool::new(2).unwrap();
        let tiny = std::hint::black_box(1e-40f32);
        let sums = [const { AtomicU32::new(0) }; 2];
        // Each thread waits for the other, so that both take part.
        pool.for_each_chunk(2, 1, |t, _| {
            sums[t].store((tiny + tiny).to_bits(), Ordering::Relaxed);
            while sums.iter().any(|s| s.load(Ordering::Relaxed) == 0) {
                std::thread::yield_now();
            }
        });
        arch::write(before);
        assert!(sums.iter().all(|s| s.load(Ordering::Relaxed) == 2 * tiny.to_bits()));
    }

    #[test]
    fn the_hosts_word_comes_back() {
        let before = arch::read();
        // Flush to zero and round towards zero.
        arch::write(0xffc0);
        {
            let _env = FloatEnv::enter();
            assert_eq!(arch::read() & arch::CONTROL, arch::DEFAULT);
        }
        let after = arch::read();
        arch::write(before);
        assert_eq!(after & arch::CONTROL, 0xffc0);
    }
}
