//! Sixteen f32 lanes: what the generic kernels are written in. A tier supplies the lanes, so an algorithm exists once and
//! every tier does the same IEEE operations in the same order.
//!
//! Invariant: an operation gives the same bits on every tier, payloads of NaNs apart. The methods are compiled into
//! functions that enable the tier's instructions; on their own they would be calls.
#![allow(unsafe_code)]

use super::{f16, fused};

/// Lanes of a vector.
pub(in super::super) const LANES: usize = 16;

/// Sixteen f32.
pub(super) trait Lanes: Copy {
    /// The same value in each lane.
    fn splat(v: f32) -> Self;
    /// From memory.
    fn load(p: &[f32; LANES]) -> Self;
    /// From half precision, exactly.
    fn load_f16(p: &[u16; LANES]) -> Self;
    /// To memory.
    fn store(self, p: &mut [f32; LANES]);
    /// To half precision, to nearest, ties to even.
    fn store_f16(self, p: &mut [u16; LANES]);
    /// `self + o`.
    fn add(self, o: Self) -> Self;
    /// `self - o`.
    fn sub(self, o: Self) -> Self;
    /// `self * o`.
    fn mul(self, o: Self) -> Self;
    /// `self / o`.
    fn div(self, o: Self) -> Self;
    /// `self * b + c` with one rounding.
    fn fma(self, b: Self, c: Self) -> Self;
    /// The same of single values.
    #[inline(always)]
    fn fma_one(a: f32, b: f32, c: f32) -> f32 {
        fused::fma::<true>(a, b, c)
    }
    /// `if self > o { self } else { o }`: a NaN on either side gives `o`.
    fn max(self, o: Self) -> Self;
    /// `if self < o { self } else { o }`.
    fn min(self, o: Self) -> Self;
    /// To an integer, ties to even.
    fn round(self) -> Self;
    /// `self * 2^n` by adding to the exponent, for whole `n` and a normal result.
    fn scale_exponent(self, n: Self) -> Self;
    /// `|self|`.
    fn abs(self) -> Self;
    /// `|self|` with the sign of `o`.
    fn with_sign(self, o: Self) -> Self;
    /// `if self < limit { a } else { b }`.
    fn if_less(self, limit: Self, a: Self, b: Self) -> Self;
    /// The lanes from `first` to `end - 1`, the others from `o`.
    fn keep(self, first: i32, end: i32, o: Self) -> Self;
    /// Fetches the cache line of `p`; any address will do.
    fn prefetch(p: *const u8);
    /// Lane i of vector j becomes lane j of vector i.
    fn transpose(m: &mut [Self; LANES]);

    /// The lanes as an array.
    #[inline(always)]
    fn array(self) -> [f32; LANES] {
        let mut a = [0.0; LANES];
        self.store(&mut a);
        a
    }

    /// The sum of the lanes, by halves.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut a = self.array();
        let mut n = LANES / 2;
        while n > 0 {
            for i in 0..n {
                a[i] += a[i + n];
            }
            n /= 2;
        }
        a[0]
    }

    /// The largest lane, by halves.
    #[inline(always)]
    fn top(self) -> f32 {
        let mut a = self.array();
        let mut n = LANES / 2;
        while n > 0 {
            for i in 0..n {
                a[i] = if a[i] > a[i + n] { a[i] } else { a[i + n] };
            }
            n /= 2;
        }
        a[0]
    }

    /// Up to 16 values, zeros after them.
    #[inline(always)]
    fn load_part(p: &[f32]) -> Self {
        let mut a = [0.0; LANES];
        a[..p.len()].copy_from_slice(p);
        Self::load(&a)
    }

    /// The first `p.len()` lanes.
    #[inline(always)]
    fn store_part(self, p: &mut [f32]) {
        p.copy_from_slice(&self.array()[..p.len()]);
    }
}

/// The bits of a bf16: the upper half of an f32.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(in super::super) struct Bf16(pub(in super::super) u16);

impl Bf16 {
    /// Exactly.
    #[inline(always)]
    pub(in super::super) fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// To nearest, ties to even; a NaN stays one, quieted.
    #[inline(always)]
    pub(in super::super) fn from_f32(v: f32) -> Self {
        let bits = v.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        let nan = bits & 0x7fff_ffff > 0x7f80_0000;
        Bf16((if nan { bits | 0x40_0000 } else { rounded } >> 16) as u16)
    }
}

/// A stored number: f32, an f16's bits, or a bf16's.
pub(super) trait Elem: bytemuck::Pod {
    /// Sixteen of them, widened.
    fn widen<L: Lanes>(p: &[Self; LANES]) -> L;
}

impl Elem for f32 {
    #[inline(always)]
    fn widen<L: Lanes>(p: &[f32; LANES]) -> L {
        L::load(p)
    }
}

impl Elem for u16 {
    #[inline(always)]
    fn widen<L: Lanes>(p: &[u16; LANES]) -> L {
        L::load_f16(p)
    }
}

// Shifts and sums of whole numbers, which compilers turn into a few instructions a vector on every tier.
impl Elem for Bf16 {
    #[inline(always)]
    fn widen<L: Lanes>(p: &[Bf16; LANES]) -> L {
        L::load(&p.map(Bf16::to_f32))
    }
}

/// The truth: plain Rust. `FUSED`: with fused multiply-adds in hardware.
#[derive(Clone, Copy)]
pub(super) struct Scalar<const FUSED: bool>([f32; LANES]);

/// For every machine of the architecture.
pub(super) type Base = Scalar<{ fused::EVERYWHERE }>;
/// For those with FMA.
#[cfg(target_arch = "x86_64")]
pub(super) type ScalarFma = Scalar<true>;

impl<const FUSED: bool> Scalar<FUSED> {
    #[inline(always)]
    fn zip(self, o: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Scalar(std::array::from_fn(|i| f(self.0[i], o.0[i])))
    }
}

impl<const FUSED: bool> Lanes for Scalar<FUSED> {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        Scalar([v; LANES])
    }
    #[inline(always)]
    fn load(p: &[f32; LANES]) -> Self {
        Scalar(*p)
    }
    #[inline(always)]
    fn load_f16(p: &[u16; LANES]) -> Self {
        Scalar(p.map(f16::to_f32))
    }
    #[inline(always)]
    fn store(self, p: &mut [f32; LANES]) {
        *p = self.0;
    }
    #[inline(always)]
    fn store_f16(self, p: &mut [u16; LANES]) {
        *p = self.0.map(f16::from_f32);
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        self.zip(o, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        self.zip(o, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        self.zip(o, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        self.zip(o, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Scalar(std::array::from_fn(|i| fused::fma::<FUSED>(self.0[i], b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn fma_one(a: f32, b: f32, c: f32) -> f32 {
        fused::fma::<FUSED>(a, b, c)
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        self.zip(o, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        self.zip(o, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn round(self) -> Self {
        Scalar(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn scale_exponent(self, n: Self) -> Self {
        self.zip(n, |a, n| f32::from_bits(a.to_bits().wrapping_add((n as i32 as u32) << 23)))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Scalar(self.0.map(f32::abs))
    }
    #[inline(always)]
    fn with_sign(self, o: Self) -> Self {
        self.zip(o, f32::copysign)
    }
    #[inline(always)]
    fn if_less(self, limit: Self, a: Self, b: Self) -> Self {
        Scalar(std::array::from_fn(|i| if self.0[i] < limit.0[i] { a.0[i] } else { b.0[i] }))
    }
    #[inline(always)]
    fn keep(self, first: i32, end: i32, o: Self) -> Self {
        Scalar(std::array::from_fn(|i| if (first..end).contains(&(i as i32)) { self.0[i] } else { o.0[i] }))
    }
    #[inline(always)]
    fn prefetch(_: *const u8) {}
    #[inline(always)]
    fn transpose(m: &mut [Self; LANES]) {
        let from = *m;
        for (i, to) in m.iter_mut().enumerate() {
            *to = Scalar(std::array::from_fn(|j| from[j].0[i]));
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub(super) use sse41::Sse41;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "aarch64")]
#[path = "lanes_neon.rs"]
pub(super) mod neon;
#[cfg(target_arch = "x86_64")]
#[path = "lanes_sse41.rs"]
pub(super) mod sse41;
#[cfg(target_arch = "x86_64")]
#[path = "lanes_x86.rs"]
mod x86;

#[cfg(test)]
mod tests {
    use super::super::Tier;
    use super::*;

    #[test]
    fn halves_agree_with_the_reference() {
        for h in 0..=u16::MAX {
            let v = f16::to_f32(h);
            let want = half::f16::from_bits(h);
            assert!(v.to_bits() == want.to_f32().to_bits() || v.is_nan() && want.is_nan(), "{h:#x}");
            if !v.is_nan() {
                assert_eq!(f16::from_f32(v), h);
            }
        }
    }

    #[test]
    fn halves_are_the_same_on_every_tier() {
        // Both sides of every tie, and NaNs.
        let x: Vec<_> = (0..=u16::MAX)
            .flat_map(|h| {
                [0u32, 0x0fff, 0x1000, 0x1001].map(|low| f32::from_bits(u32::from(h) << 16 | low | u32::from(h & 1) << 15))
            })
            .chain([1.0; 3])
            .collect();
        let (mut truth, mut got) = (vec![0; x.len()], vec![1; x.len()]);
        Tier::named("scalar").unwrap().attention.narrow(&x, &mut truth);
        for tier in Tier::available() {
            tier.attention.narrow(&x, &mut got);
            assert!(truth == got, "{}", tier.name);
        }
        for (x, h) in x.iter().zip(&truth) {
            let want = half::f16::from_f32_const(*x);
            assert!(*h == want.to_bits() || x.is_nan() && half::f16::from_bits(*h).is_nan(), "{x:e}");
        }
    }

    #[test]
    fn bf16_is_the_upper_half_of_an_f32() {
        for bits in 0..=u16::MAX {
            let (v, want) = (Bf16(bits).to_f32(), half::bf16::from_bits(bits));
            assert_eq!(v.to_bits(), u32::from(bits) << 16);
            assert!(v.to_bits() == want.to_f32().to_bits() || v.is_nan() && want.is_nan());
            // Its own neighbourhood, where a half decides, and whether the last bit is even.
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(bits) << 16 | low);
                let (got, want) = (Bf16::from_f32(x), half::bf16::from_f32(x));
                assert!(got.0 == want.to_bits() || x.is_nan() && got.to_f32().is_nan(), "{:#x}", x.to_bits());
            }
        }
    }
}
