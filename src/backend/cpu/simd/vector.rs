//! Row operations outside the matrices, written once over [`Lanes`]: norms, rotations, activations, sums.
//!
//! Sums run in 16 lanes by index % 16, then by halves; the last few values of a row count as a vector with zeros.
#![allow(unsafe_code)]

#[cfg(target_arch = "aarch64")]
use super::lanes::Neon;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512, ScalarFma, Sse41};
use super::lanes::{Base, LANES, Lanes};
use super::math;
use crate::arch::{Activation, Glu, NormKind, NormSpec, RopeStyle};

type NormFn = unsafe fn(NormSpec, &[f32], &[f32], Option<&[f32]>, &mut [f32]);

/// The row kernels of a tier.
pub(in super::super) struct VectorKernels {
    norm: NormFn,
    rope: unsafe fn(RopeStyle, &mut [f32], &[f32], &[f32]),
    norm_in_place: unsafe fn(NormSpec, &mut [f32], &[f32]),
    gate: unsafe fn(Glu, &[f32], &[f32], &mut [f32]),
    activate: unsafe fn(Activation, &mut [f32]),
    softmax: unsafe fn(&mut [f32]),
    sigmoid: unsafe fn(&mut [f32]),
    add: unsafe fn(&mut [f32], &[f32], f32),
    scale_cap: unsafe fn(&mut [f32], f32, Option<f32>),
}

impl VectorKernels {
    /// `out = norm(x) * weight (+ bias)` for one row.
    pub(in super::super) fn norm(&self, spec: NormSpec, x: &[f32], weight: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
        assert!(x.len() == out.len() && weight.len() == out.len() && bias.is_none_or(|b| b.len() == out.len()));
        // SAFETY: the tier's instructions are there: `Tier::available` hands no other table out.
        unsafe { (self.norm)(spec, x, weight, bias, out) }
    }

    /// Turns one head's values, all of `x`, by the angles of its position.
    pub(in super::super) fn rope(&self, style: RopeStyle, x: &mut [f32], cos: &[f32], sin: &[f32]) {
        assert!(cos.len() == sin.len() && x.len() == 2 * cos.len());
        // SAFETY: the tier's instructions are there.
        unsafe { (self.rope)(style, x, cos, sin) }
    }

    /// `x = norm(x) * weight` for one row, with the bits of [`norm`](Self::norm).
    pub(in super::super) fn norm_in_place(&self, spec: NormSpec, x: &mut [f32], weight: &[f32]) {
        assert_eq!(x.len(), weight.len());
        // SAFETY: the tier's instructions are there.
        unsafe { (self.norm_in_place)(spec, x, weight) }
    }

    /// `out = glu(gate, up)`.
    pub(in super::super) fn gate(&self, glu: Glu, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == out.len() && up.len() == out.len());
        // SAFETY: the tier's instructions are there.
        unsafe { (self.gate)(glu, gate, up, out) }
    }

    /// `x = act(x)`.
    pub(in super::super) fn activate(&self, act: Activation, x: &mut [f32]) {
        // SAFETY: the tier's instructions are there.
        unsafe { (self.activate)(act, x) }
    }

    /// `x = softmax(x)`; a NaN makes all of it NaN.
    pub(in super::super) fn softmax(&self, x: &mut [f32]) {
        // SAFETY: the tier's instructions are there.
        unsafe { (self.softmax)(x) }
    }

    /// `x = sigmoid(x)`.
    pub(in super::super) fn sigmoid(&self, x: &mut [f32]) {
        // SAFETY: the tier's instructions are there.
        unsafe { (self.sigmoid)(x) }
    }

    /// `x += y * scale` with one rounding.
    pub(in super::super) fn add(&self, x: &mut [f32], y: &[f32], scale: f32) {
        assert_eq!(x.len(), y.len());
        // SAFETY: the tier's instructions are there.
        unsafe { (self.add)(x, y, scale) }
    }

    /// `x = cap * tanh(x * scale / cap)`, or `x * scale`.
    pub(in super::super) fn scale_cap(&self, x: &mut [f32], scale: f32, cap: Option<f32>) {
        // SAFETY: the tier's instructions are there.
        unsafe { (self.scale_cap)(x, scale, cap) }
    }
}

/// Stores a function of each value of some slices in the last. Macros, since a closure is not always inlined, and outside of
/// a function that enables the tier's instructions each operation is a call.
macro_rules! map {
    ($l:ty, $out:expr, |$x:ident| $f:expr) => {{
        let (outs, out_rest) = $out.as_chunks_mut::<LANES>();
        for out in outs {
            let $x = <$l>::load(out);
            ($f).store(out);
        }
        if !out_rest.is_empty() {
            let $x = <$l>::load_part(out_rest);
            ($f).store_part(out_rest);
        }
    }};
    ($l:ty, $out:expr, $y:expr, |$x:ident, $v:ident| $f:expr) => {{
        let (outs, out_rest) = $out.as_chunks_mut::<LANES>();
        let (ys, y_rest) = $y.as_chunks::<LANES>();
        for (out, y) in outs.iter_mut().zip(ys) {
            let ($x, $v) = (<$l>::load(out), <$l>::load(y));
            ($f).store(out);
        }
        if !out_rest.is_empty() {
            let ($x, $v) = (<$l>::load_part(out_rest), <$l>::load_part(y_rest));
            ($f).store_part(out_rest);
        }
    }};
    ($l:ty, $x:expr, $y:expr => $out:expr, |$u:ident, $v:ident| $f:expr) => {{
        let (xs, x_rest) = $x.as_chunks::<LANES>();
        let (ys, y_rest) = $y.as_chunks::<LANES>();
        let (outs, out_rest) = $out.as_chunks_mut::<LANES>();
        for ((x, y), out) in xs.iter().zip(ys).zip(outs) {
            let ($u, $v) = (<$l>::load(x), <$l>::load(y));
            ($f).store(out);
        }
        if !out_rest.is_empty() {
            let ($u, $v) = (<$l>::load_part(x_rest), <$l>::load_part(y_rest));
            ($f).store_part(out_rest);
        }
    }};
}

macro_rules! tier {
    ($table:ident, $module:ident, $lanes:ident, $features:tt) => {
        pub(in super::super) static $table: VectorKernels = VectorKernels {
            norm: $module::norm,
            rope: $module::rope,
            norm_in_place: $module::norm_in_place,
            gate: $module::gate,
            activate: $module::activate,
            softmax: $module::softmax,
            sigmoid: $module::sigmoid,
            add: $module::add,
            scale_cap: $module::scale_cap,
        };

        #[allow(clippy::missing_safety_doc)]
        mod $module {
            use super::*;

            enable!(
                $features,
                pub(super) fn norm(s: NormSpec, x: &[f32], w: &[f32], b: Option<&[f32]>, out: &mut [f32]) {
                    super::norm::<$lanes>(s, x, w, b, out);
                }
            );
            enable!(
                $features,
                pub(super) fn rope(style: RopeStyle, x: &mut [f32], cos: &[f32], sin: &[f32]) {
                    super::rope::<$lanes>(style, x, cos, sin);
                }
            );
            enable!(
                $features,
                pub(super) fn norm_in_place(s: NormSpec, x: &mut [f32], w: &[f32]) {
                    super::norm_in_place::<$lanes>(s, x, w);
                }
            );
            enable!(
                $features,
                pub(super) fn gate(glu: Glu, x: &[f32], y: &[f32], out: &mut [f32]) {
                    super::gate::<$lanes>(glu, x, y, out);
                }
            );
            enable!(
                $features,
                pub(super) fn activate(act: Activation, x: &mut [f32]) {
                    super::activate::<$lanes>(act, x);
                }
            );
            enable!(
                $features,
                pub(super) fn softmax(x: &mut [f32]) {
                    super::softmax::<$lanes>(x);
                }
            );
            enable!(
                $features,
                pub(super) fn sigmoid(x: &mut [f32]) {
                    map!($lanes, x, |x| math::sigmoid(x));
                }
            );
            enable!(
                $features,
                pub(super) fn add(x: &mut [f32], y: &[f32], scale: f32) {
                    let scale = <$lanes as Lanes>::splat(scale);
                    map!($lanes, x, y, |x, y| y.fma(scale, x));
                }
            );
            enable!(
                $features,
                pub(super) fn scale_cap(x: &mut [f32], scale: f32, cap: Option<f32>) {
                    super::scale_cap::<$lanes>(x, scale, cap);
                }
            );
        }
    };
}

tier!(SCALAR, scalar, Base, "");
#[cfg(target_arch = "x86_64")]
tier!(SCALAR_FMA, scalar_fma, ScalarFma, "fma");
#[cfg(target_arch = "x86_64")]
tier!(SSE41, sse41, Sse41, "ssse3,sse4.1");
#[cfg(target_arch = "aarch64")]
tier!(NEON, neon, Neon, "neon");
#[cfg(target_arch = "x86_64")]
tier!(AVX2, avx2, Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
tier!(AVX512, avx512, Avx512, "avx512f,avx512bw,avx512vl,avx2,fma,f16c");

/// What a row's values are reduced by, and what they are multiplied with then.
#[inline(always)]
fn moments<L: Lanes>(spec: NormSpec, x: &[f32]) -> (L, L) {
    let n = x.len() as f32;
    let (whole, rest) = x.as_chunks::<LANES>();
    let mean = match spec.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => {
            let mut sum = L::splat(0.0);
            for x in whole {
                sum = sum.add(L::load(x));
            }
            sum.add(L::load_part(rest)).sum() / n
        }
    };
    let centre = L::splat(mean);
    let mut squares = L::splat(0.0);
    for x in whole {
        let x = L::load(x).sub(centre);
        squares = x.fma(x, squares);
    }
    if !rest.is_empty() {
        let x = L::load_part(rest).sub(centre).keep(0, rest.len() as i32, L::splat(0.0));
        squares = x.fma(x, squares);
    }
    (centre, L::splat(1.0 / (squares.sum() / n + spec.eps).sqrt()))
}

#[inline(always)]
fn norm_in_place<L: Lanes>(spec: NormSpec, x: &mut [f32], weight: &[f32]) {
    let (centre, inverse) = moments::<L>(spec, x);
    map!(L, x, weight, |x, w| x.sub(centre).mul(inverse).mul(w));
}

#[inline(always)]
fn norm<L: Lanes>(spec: NormSpec, x: &[f32], weight: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
    let (centre, inverse) = moments::<L>(spec, x);
    let (whole, rest) = x.as_chunks::<LANES>();
    let (ws, w_rest) = weight.as_chunks::<LANES>();
    let (bs, b_rest) = bias.unwrap_or(&[]).as_chunks::<LANES>();
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    for (i, out) in outs.iter_mut().enumerate() {
        let y = L::load(&whole[i]).sub(centre).mul(inverse);
        let w = L::load(&ws[i]);
        match bias {
            Some(_) => y.fma(w, L::load(&bs[i])).store(out),
            None => y.mul(w).store(out),
        }
    }
    if !rest.is_empty() {
        let y = L::load_part(rest).sub(centre).mul(inverse);
        let w = L::load_part(w_rest);
        match bias {
            Some(_) => y.fma(w, L::load_part(b_rest)).store_part(out_rest),
            None => y.mul(w).store_part(out_rest),
        }
    }
}

/// A pair (a, b) becomes (a cos - b sin, b cos + a sin), the second product of each rounded first.
#[inline(always)]
fn rope<L: Lanes>(style: RopeStyle, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let turn = |a: f32, b: f32, c: f32, s: f32| (L::fma_one(a, c, b * (0.0 - s)), L::fma_one(b, c, a * s));
    match style {
        RopeStyle::HalfSplit => {
            let (a, b) = x.split_at_mut(cos.len());
            let (av, a_rest) = a.as_chunks_mut::<LANES>();
            let (bv, b_rest) = b.as_chunks_mut::<LANES>();
            let (cv, c_rest) = cos.as_chunks::<LANES>();
            let (sv, s_rest) = sin.as_chunks::<LANES>();
            for (((a, b), c), s) in av.iter_mut().zip(bv).zip(cv).zip(sv) {
                let (x, y, c, s) = (L::load(a), L::load(b), L::load(c), L::load(s));
                x.fma(c, y.mul(L::splat(0.0).sub(s))).store(a);
                y.fma(c, x.mul(s)).store(b);
            }
            for (((a, b), c), s) in a_rest.iter_mut().zip(b_rest).zip(c_rest).zip(s_rest) {
                (*a, *b) = turn(*a, *b, *c, *s);
            }
        }
        RopeStyle::Interleaved => {
            let (pairs, _) = x.as_chunks_mut::<2>();
            for ((pair, c), s) in pairs.iter_mut().zip(cos).zip(sin) {
                let (a, b) = turn(pair[0], pair[1], *c, *s);
                *pair = [a, b];
            }
        }
    }
}

#[inline(always)]
fn gate<L: Lanes>(glu: Glu, x: &[f32], y: &[f32], out: &mut [f32]) {
    match glu {
        Glu::Act(Activation::Silu) => map!(L, x, y => out, |x, y| math::silu(x).mul(y)),
        Glu::Act(Activation::Gelu) => map!(L, x, y => out, |x, y| math::gelu(x).mul(y)),
        Glu::Act(Activation::GeluTanh) => map!(L, x, y => out, |x, y| math::gelu_tanh(x).mul(y)),
        Glu::Act(Activation::Relu) => map!(L, x, y => out, |x, y| math::relu(x).mul(y)),
        Glu::Clamped { alpha, limit } => {
            let (one, alpha) = (L::splat(1.0), L::splat(alpha));
            let (least, most) = (L::splat(-limit), L::splat(limit));
            map!(L, x, y => out, |x, y| {
                // In this order a NaN passes.
                let (gate, up) = (most.min(x), most.min(least.max(y)));
                up.add(one).mul(gate.mul(math::sigmoid(gate.mul(alpha))))
            });
        }
    }
}

#[inline(always)]
fn activate<L: Lanes>(act: Activation, x: &mut [f32]) {
    match act {
        Activation::Silu => map!(L, x, |x| math::silu(x)),
        Activation::Gelu => map!(L, x, |x| math::gelu(x)),
        Activation::GeluTanh => map!(L, x, |x| math::gelu_tanh(x)),
        Activation::Relu => map!(L, x, |x| math::relu(x)),
    }
}

#[inline(always)]
fn softmax<L: Lanes>(x: &mut [f32]) {
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut top = L::load_part(rest).keep(0, rest.len() as i32, L::splat(f32::NEG_INFINITY));
    for x in whole {
        // A NaN may be passed over here; it is in the sum.
        top = L::load(x).max(top);
    }
    let top = L::splat(top.top());
    map!(L, x, |x| math::exp(x.sub(top)));
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut sum = L::splat(0.0);
    for x in whole {
        sum = sum.add(L::load(x));
    }
    let sum = L::splat(sum.add(L::load_part(rest)).sum());
    map!(L, x, |x| x.div(sum));
}

#[inline(always)]
fn scale_cap<L: Lanes>(x: &mut [f32], scale: f32, cap: Option<f32>) {
    let scale = L::splat(scale);
    match cap {
        None => map!(L, x, |x| x.mul(scale)),
        Some(cap) => {
            let cap = L::splat(cap);
            map!(L, x, |x| math::tanh(x.mul(scale).div(cap)).mul(cap));
        }
    }
}
