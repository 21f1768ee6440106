//! What a core can do at most, measured in the run that a kernel's speed is compared with: what it reads in a second, and what it
//! computes. A kernel near the first is as fast as memory lets it be, one near the second as fast as its instructions.

use criterion::BenchmarkGroup;
use criterion::measurement::WallTime;
use loquat::backend::Backend;
use loquat::backend::cpu::{Cpu, Peak};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// What a call does.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    /// Of weights read once, or of values read and written.
    pub(crate) bytes: u64,
    /// Multiplications and additions; 0 where they are not what counts.
    pub(crate) operations: u64,
    /// They are of 8-bit integers.
    pub(crate) integers: bool,
}

/// The most that one core of this machine does with a tier's instructions.
pub(crate) struct Peaks {
    /// Over a list as long as the kernels' weights.
    read_gb_s: f64,
    /// Nothing for the scalar tier.
    compute: Option<Peak>,
}

impl Peaks {
    /// Reads `footprint` bytes again and again for a while, and computes for a while; tells what it found.
    pub(crate) fn measure(cpu: &Cpu, footprint: usize) -> Self {
        let words = vec![1u64; footprint / 8];
        let (began, mut read_gb_s) = (Instant::now(), 0.0f64);
        while began.elapsed() < Duration::from_millis(100) {
            let start = Instant::now();
            // So many that none waits for itself, and the compiler makes vectors of them.
            let mut sums = [0u64; 16];
            for line in black_box(&words).as_chunks::<16>().0 {
                sums.iter_mut().zip(line).for_each(|(sum, word)| *sum ^= word);
            }
            black_box(sums);
            read_gb_s = read_gb_s.max(footprint as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        let peaks = Peaks { read_gb_s, compute: cpu.peak() };
        print!("{}: one core reads {read_gb_s:.1} GB/s of {} MiB", cpu.tier(), footprint >> 20);
        match &peaks.compute {
            Some(Peak { f32_gop_s, int8_gop_s, .. }) => {
                println!(", computes {f32_gop_s:.1} Gop/s of f32, {int8_gop_s:.1} of 8-bit integers")
            }
            None => println!(),
        }
        peaks
    }

    /// Times `f` as a bench, and tells its speed in shares of the most.
    pub(crate) fn bench(&self, group: &mut BenchmarkGroup<'_, WallTime>, name: &str, work: Work, mut f: impl FnMut()) {
        let mut seconds = Vec::new();
        group.bench_function(name, |b| {
            b.iter_custom(|n| {
                let start = Instant::now();
                (0..n).for_each(|_| f());
                let took = start.elapsed();
                seconds.push(took.as_secs_f64() / n as f64);
                took
            });
        });
        seconds.sort_by(f64::total_cmp);
        // A bench that was not asked for has not run.
        let Some(&median) = seconds.get(seconds.len() / 2) else { return };
        let read = work.bytes as f64 / median / 1e9;
        print!("  {name}: {read:.2} GB/s, {:.0} % of what a core reads", read / self.read_gb_s * 100.0);
        if work.operations > 0 {
            let done = work.operations as f64 / median / 1e9;
            print!("; {done:.1} Gop/s");
            if let Some(peak) = &self.compute {
                let (most, of) = if work.integers { (peak.int8_gop_s, "8-bit") } else { (peak.f32_gop_s, "f32") };
                print!(", {:.0} % of the {of} peak", done / most * 100.0);
            }
        }
        println!();
    }
}
