//! `a * b + c` with one rounding, where no instruction does it.
//!
//! ```text
//! p = a * b             exact in doubles: 24 + 24 bits
//! s + e = p + c         s rounded, e what the rounding left (Knuth's TwoSum)
//! t = s rounded to odd  towards zero instead, and the last bit set where that was not exact
//! t as f32              the only rounding that counts
//! ```
//!
//! A double has more than two bits over what an f32 keeps, subnormal ones included, so the odd last bit says on which side of
//! a tie the exact sum lies. Where there is a NaN or an infinity, `e` is NaN and `s` is taken as it is.
//!
//! `f32::mul_add` will not do: without the instruction it is a library's, and the one that Rust links rounds some subnormal
//! results twice (1.95).
#![allow(unsafe_code)]

/// True where everything compiled for the architecture may use the instruction.
pub(super) const EVERYWHERE: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// `a * b + c`. `FUSED`: compiled into a function that has the instruction.
#[inline(always)]
pub(super) fn fma<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { emulated(a, b, c) }
}

#[inline(always)]
fn emulated(a: f32, b: f32, c: f32) -> f32 {
    let (p, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let s = p + c;
    let back = s - p;
    let e = (p - (s - back)) + (c - back);
    let inexact = u64::from(e.abs() > 0.0);
    // One less where the rounding went away from zero.
    let away = inexact & (s.to_bits() ^ e.to_bits()) >> 63;
    f64::from_bits((s.to_bits() - away) | inexact) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::synthetic::Rng;

    const LANES: usize = 16;

    #[cfg(target_arch = "x86_64")]
    enable!(
        "ssse3,sse4.1",
        fn sse41(a: &[f32; LANES], b: &[f32; LANES], c: &[f32; LANES]) -> [f32; LANES] {
            use crate::backend::cpu::simd::lanes::{Lanes, Sse41};
            Sse41::load(a).fma(Sse41::load(b), Sse41::load(c)).array()
        }
    );

    /// All ways without the instruction against the instruction.
    fn check(what: &str, mut triple: impl FnMut() -> [f32; 3], count: usize) {
        for _ in 0..count / LANES {
            let triples: [[f32; 3]; LANES] = std::array::from_fn(|_| triple());
            let [a, b, c] = [0, 1, 2].map(|i| triples.map(|t| t[i]));
            let scalar = triples.map(|[a, b, c]| emulated(a, b, c));
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a processor with FMA has SSE4.1.
            let ways = [scalar, unsafe { sse41(&a, &b, &c) }];
            #[cfg(not(target_arch = "x86_64"))]
            let ways = [scalar];
            for i in 0..LANES {
                let want = a[i].mul_add(b[i], c[i]);
                for (way, got) in ways.iter().map(|y| y[i]).enumerate() {
                    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    assert!(same, "{what}, way {way}: {:e} * {:e} + {:e} is {want:e}, not {got:e}", a[i], b[i], c[i]);
                }
            }
        }
    }

    /// A number of this exponent, 0 being that of subnormals, with a few bits set at one end or both.
    fn number(rng: &mut Rng, exponent: i32) -> f32 {
        let bits = rng.bits();
        let man = match bits >> 28 & 3 {
            0 => bits & 0x7f_ffff,
            1 => bits & 7,
            2 => 0x7f_ffff - (bits & 7),
            _ => (bits & 7) << 20 | bits >> 4 & 7,
        };
        f32::from_bits(bits & 1 << 31 | (exponent.clamp(0, 254) as u32) << 23 | man)
    }

    #[test]
    fn fma_without_the_instruction_rounds_once() {
        #[cfg(target_arch = "x86_64")]
        if !is_x86_feature_detected!("fma") {
            return println!("skipped: no FMA to compare with");
        }
        let tiny = f32::from_bits(1);
        let special = [
            [0.0, tiny, f32::from_bits(0x7f_ffff), f32::MIN_POSITIVE],
            [1.0, 1.5, f32::MAX, f32::INFINITY],
            [f32::NAN, f32::EPSILON, 16_777_215.0, 1.0 - f32::EPSILON / 2.0],
        ];
        let special: Vec<f32> = special.into_iter().flatten().flat_map(|v| [v, -v]).collect();
        let n = special.len();
        let mut i = 0;
        let each = || {
            i += 1;
            [special[i % n], special[i / n % n], special[i / (n * n) % n]]
        };
        check("special", each, n * n * n + LANES);

        let mut rng = Rng(1);
        check("any bits", || [0; 3].map(|_| f32::from_bits(rng.bits())), 1 << 20);
        // A product of which the addend is anything from all to nothing, results subnormal and infinite ones included.
        check(
            "any distance",
            || {
                let (a, b, apart) = (rng.bits() % 255, rng.bits() % 255, rng.bits() % 120);
                let at = a as i32 + b as i32 - 127;
                [number(&mut rng, a as i32), number(&mut rng, b as i32), number(&mut rng, at + apart as i32 - 60)]
            },
            1 << 21,
        );
        // The product is half a unit in the addend's last place, or nearly, so that the sum is a tie or nearly one; also
        // where the addend is subnormal, or nearly infinite.
        check(
            "the addend's ties",
            || {
                let c = if rng.bits() & 1 == 0 { rng.bits() % 4 } else { rng.bits() % 255 };
                // Of both factors, so that none is subnormal.
                let exponents = c.max(1) as i32 - 24 + 127;
                let (least, most) = ((exponents - 254).max(1), (exponents - 1).min(254));
                let a = least + (rng.bits() % (most - least + 1) as u32) as i32;
                [number(&mut rng, a), number(&mut rng, exponents - a), number(&mut rng, c as i32)]
            },
            1 << 21,
        );
        // The product of 12 and 13 bits is a tie, or one of up to 48 bits in the subnormal range; the addend breaks it or not.
        check(
            "the product's ties",
            || {
                let (x, y) = (rng.bits() >> 20 | 0x801, rng.bits() >> 19 | 0x1001);
                let (e, f) = (rng.bits() as i32 % 70, rng.bits() as i32 % 90);
                let power = |n: i32| f64::from(n).exp2();
                let (a, b) = ((f64::from(x) * power(e)) as f32, (f64::from(y) * power(-e - 24 * (f.rem_euclid(8)))) as f32);
                let c = match rng.bits() & 3 {
                    0 => 0.0,
                    1 => tiny,
                    2 => -tiny,
                    _ => (f64::from(a) * f64::from(b) * power(-24 - f.rem_euclid(70))) as f32,
                };
                [a, if rng.bits() & 1 == 0 { b } else { -b }, c]
            },
            1 << 21,
        );
    }
}
