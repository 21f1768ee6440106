//! Exponential, tanh, erf and the activations made of them, as polynomials in fused multiply-adds. The coefficients are
//! minimax fits (Remez) in 40 digits, rounded to f32.
//!
//! Invariant: NaN stays NaN, infinities give the function's limit. The largest errors, as the tests below measure them
//! against f64 over a grid of the whole range: exp2 1 ulp, exp 1.1 ulp, tanh 2 ulp, erf 2 ulp.
#![forbid(unsafe_code)]

use super::lanes::Lanes;

/// `2^x` for `x <= 127`; 0 below -126, where f32 has no normal numbers.
#[inline(always)]
pub(super) fn exp2<L: Lanes>(x: L) -> L {
    let least = L::splat(-126.0);
    let held = least.max(x);
    let n = held.round();
    let r = held.sub(n);
    let p = poly(r, &EXP2).fma(r, L::splat(1.0));
    x.if_less(least, L::splat(0.0), p.scale_exponent(n))
}

/// `e^x`, subnormal results and overflow to infinity included.
#[inline(always)]
pub(super) fn exp<L: Lanes>(x: L) -> L {
    let held = L::splat(EXP_MOST).min(L::splat(EXP_LEAST).max(x));
    let n = held.mul(L::splat(std::f32::consts::LOG2_E)).round();
    let r = n.fma(L::splat(-LN2_HIGH), held);
    let r = n.fma(L::splat(-LN2_LOW), r);
    let p = poly(r, &EXP).fma(r.mul(r), r).add(L::splat(1.0));
    // In two steps: 2^n alone may be no normal number.
    let one = L::splat(1.0);
    let half = n.mul(L::splat(0.5)).round();
    p.mul(one.scale_exponent(half)).mul(one.scale_exponent(n.sub(half)))
}

/// The hyperbolic tangent.
#[inline(always)]
pub(super) fn tanh<L: Lanes>(x: L) -> L {
    let (a, z) = (x.abs(), x.mul(x));
    let small = poly(z, &TANH).fma(z.mul(x), x);
    let one = L::splat(1.0);
    let large = one.sub(L::splat(2.0).div(exp(a.add(a)).add(one)));
    a.if_less(L::splat(0.625), small, large).with_sign(x)
}

/// The error function.
#[inline(always)]
pub(super) fn erf<L: Lanes>(x: L) -> L {
    let (a, z) = (x.abs(), x.mul(x));
    let small = poly(z, &ERF).fma(x, x);
    // ln(1 - erf) is nearly a parabola; from 4 on erf rounds to 1.
    let large = L::splat(1.0).sub(exp(poly(L::splat(4.0).min(a), &LN_ERFC)));
    a.if_less(L::splat(1.0), small, large).with_sign(x)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid<L: Lanes>(x: L) -> L {
    L::splat(1.0).div(exp(L::splat(0.0).sub(x)).add(L::splat(1.0)))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(super) fn silu<L: Lanes>(x: L) -> L {
    x.div(exp(L::splat(0.0).sub(x)).add(L::splat(1.0)))
}

/// `x * Phi(x)`.
#[inline(always)]
pub(super) fn gelu<L: Lanes>(x: L) -> L {
    let one = erf(x.mul(L::splat(std::f32::consts::FRAC_1_SQRT_2))).add(L::splat(1.0));
    x.mul(L::splat(0.5)).mul(one)
}

/// Gelu by tanh: `(1 + tanh u) / 2` is `sigmoid(2u)`, which loses no digits where tanh nears -1.
#[inline(always)]
pub(super) fn gelu_tanh<L: Lanes>(x: L) -> L {
    let cube = x.mul(x).mul(x);
    let u = cube.fma(L::splat(0.044_715), x).mul(L::splat(-2.0 * 0.797_884_6));
    x.div(exp(u).add(L::splat(1.0)))
}

/// `max(x, 0)`.
#[inline(always)]
pub(super) fn relu<L: Lanes>(x: L) -> L {
    L::splat(0.0).max(x)
}

/// Coefficients from the lowest on.
#[inline(always)]
fn poly<L: Lanes, const N: usize>(x: L, c: &[f32; N]) -> L {
    let mut p = L::splat(c[N - 1]);
    for i in (0..N - 1).rev() {
        p = p.fma(x, L::splat(c[i]));
    }
    p
}

/// Of (2^r - 1) / r for |r| <= 1/2; 3e-9.
const EXP2: [f32; 6] = [0.693_147_24, 0.240_226_52, 0.055_503_096, 0.009_617_689, 0.001_340_695_1, 0.000_155_954_84];
/// Of (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2; 3e-9.
const EXP: [f32; 5] = [0.5, 0.166_665_17, 0.041_666_17, 0.008_369_124, 0.001_395_332_2];
/// Of (tanh(x) / x - 1) / x^2 in x^2 for |x| < 0.625; 5e-9.
const TANH: [f32; 5] = [-0.333_332_72, 0.133_311_52, -0.053_714_108, 0.020_551_719, -0.005_603_913_7];
/// Of erf(x) / x - 1 in x^2 for |x| <= 1; 1e-9.
const ERF: [f32; 7] =
    [0.128_379_17, -0.376_126_26, 0.112_835_854, -0.026_853_811, 0.005_188_327_7, -0.000_801_019_37, 7.853_861e-5];
/// Of ln(1 - erf(x)) for 1 <= x <= 4; 2e-11 of erf.
const LN_ERFC: [f32; 8] =
    [0.000_188_468_26, -1.129_580_3, -0.633_216_4, -0.108_422_1, 0.025_210_341, -0.004_205_285, 0.000_441_472_7, -2.169_761_7e-5];
/// ln 2 in two parts, the first with zeros at its end so that a product with a small integer is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Beyond these e^x is infinite, or 0.
const EXP_MOST: f32 = 89.0;
const EXP_LEAST: f32 = -105.0;

#[cfg(test)]
mod tests {
    use super::super::lanes::{Base, LANES, Lanes};
    use super::*;

    /// Over a grid of `n` steps, the largest error in units of the last place of the true value.
    fn worst(f: fn(Base) -> Base, truth: fn(f64) -> f64, from: f32, to: f32, n: usize) -> f64 {
        let mut worst = 0.0f64;
        for chunk in 0..n / LANES {
            let x: [f32; LANES] = std::array::from_fn(|i| from + (to - from) * ((chunk * LANES + i) as f32 / n as f32));
            for (x, y) in x.iter().zip(f(Base::load(&x)).array()) {
                let want = truth(f64::from(*x));
                let near = (want as f32).abs().max(f32::MIN_POSITIVE);
                let ulp = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
                worst = worst.max((f64::from(y) - want).abs() / ulp);
            }
        }
        worst
    }

    fn one(f: fn(Base) -> Base, x: f32) -> f32 {
        f(Base::splat(x)).array()[0]
    }

    #[test]
    fn errors_stay_in_bounds() {
        type Case = (&'static str, fn(Base) -> Base, fn(f64) -> f64, f32, f32, f64);
        let cases: [Case; 11] = [
            ("exp2", exp2, f64::exp2, -126.0, 0.0, 1.0),
            ("exp2", exp2, f64::exp2, -2.0, 127.0, 1.0),
            ("exp", exp, f64::exp, -104.0, 88.7, 1.1),
            ("exp", exp, f64::exp, -1.0, 1.0, 1.1),
            ("tanh", tanh, f64::tanh, -10.0, 10.0, 2.0),
            ("tanh", tanh, f64::tanh, -0.7, 0.7, 2.0),
            ("erf", erf, libm::erf, -5.0, 5.0, 2.0),
            ("erf", erf, libm::erf, -1.1, 1.1, 2.0),
            ("silu", silu, |x| x / (1.0 + (-x).exp()), -80.0, 80.0, 3.0),
            ("sigmoid", sigmoid, |x| 1.0 / (1.0 + (-x).exp()), -80.0, 80.0, 3.0),
            ("gelu_tanh", gelu_tanh, gelu_tanh_f64, -4.0, 20.0, 40.0),
        ];
        for (name, f, truth, from, to, bound) in cases {
            let worst = worst(f, truth, from, to, 400_000);
            println!("{name} over {from}..{to}: {worst:.2} ulp");
            assert!(worst <= bound, "{name} over {from}..{to}: {worst} ulp");
        }
        // Near its zeros gelu's error is one of x, as in the frameworks.
        for i in 0..100_000 {
            let x = i as f32 / 5_000.0 - 10.0;
            let want = f64::from(x) * 0.5 * libm::erfc(-f64::from(x) / std::f64::consts::SQRT_2);
            assert!((f64::from(one(gelu, x)) - want).abs() <= 2e-7 * f64::from(x.abs()).max(0.1), "{x}");
        }
    }

    fn gelu_tanh_f64(x: f64) -> f64 {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
        x / (1.0 + (-2.0 * u).exp())
    }

    #[test]
    fn extremes_have_their_limits() {
        let inf = f32::INFINITY;
        for (f, x, y) in [
            (exp2 as fn(Base) -> Base, 0.0, 1.0),
            (exp2, -inf, 0.0),
            (exp2, -1e30, 0.0),
            (exp, inf, inf),
            (exp, 89.0, inf),
            (exp, -inf, 0.0),
            (exp, -1e30, 0.0),
            (exp, 0.0, 1.0),
            (tanh, inf, 1.0),
            (tanh, -inf, -1.0),
            (tanh, 1e30, 1.0),
            (tanh, 1e-40, 1e-40),
            (erf, inf, 1.0),
            (erf, -inf, -1.0),
            (erf, 1e30, 1.0),
            (sigmoid, inf, 1.0),
            (sigmoid, -inf, 0.0),
            (silu, inf, inf),
            (silu, -1e30, -0.0),
            (gelu, inf, inf),
            (gelu, -1e30, -0.0),
            (gelu_tanh, inf, inf),
            (gelu_tanh, -1e30, -0.0),
            (relu, -inf, 0.0),
            (relu, inf, inf),
        ] {
            let got = one(f, x);
            assert!(got == y, "at {x}: {got} for {y}");
        }
        assert!(one(exp, -103.0) > 0.0, "subnormal results are kept");
        assert!(one(tanh, -0.0).is_sign_negative() && one(erf, -0.0).is_sign_negative());
        for f in [exp2 as fn(Base) -> Base, exp, tanh, erf, sigmoid, silu, gelu, gelu_tanh, relu] {
            assert!(one(f, f32::NAN).is_nan());
        }
    }
}
