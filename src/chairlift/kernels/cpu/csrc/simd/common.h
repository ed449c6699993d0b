// Functions on top of the vector layer, the same for every instruction set.
#pragma once

namespace chairlift::CHAIRLIFT_ISA {

// The four bytes at p in each lane.
static inline I broadcast4(const void* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return iset1(four);
}

// e^x = 2^n * (1 + r + r^2 p(r)) with r in [-ln 2 / 2, ln 2 / 2] and p a minimax polynomial of degree 5.
struct Exponential {
  F n, r, p;
};
static inline Exponential split_exponential(F x) {
  const F n = round_even(mul(x, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  return {n, r, fma(p, r, set1(5.0000001201e-1f))};
}

// e^x. x is clamped to [-87.3, 88.3] first, but below -87.3 the result is 0 exactly (and NaN gives NaN or 0 or a finite
// number: callers mask). About 2 ulp.
static inline F exp(F x) {
  const F lowest = set1(-87.3f);
  const Exponential e = split_exponential(max(min(x, set1(88.3f)), lowest));
  const F p = fma(e.p, mul(e.r, e.r), add(e.r, set1(1.0f)));
  return select(less(x, lowest), zero(), times_pow2i(p, e.n));
}

// e^x - 1 for x <= 88.3, without cancellation near 0.
static inline F expm1(F x) {
  const Exponential e = split_exponential(max(x, set1(-87.3f)));
  const F power = times_pow2i(set1(1.0f), e.n);
  return fma(fma(e.p, mul(e.r, e.r), e.r), power, sub(power, set1(1.0f)));
}

static inline F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exp(neg(x)))); }
static inline F silu(F x) { return div(x, add(set1(1.0f), exp(neg(x)))); }

// GELU (Hendrycks and Gimpel, 2016), x * (1 + erf(x / sqrt(2))) / 2 = max(x, 0) - |x| * erfc(|x| / sqrt(2)) / 2. As in
// Abramowitz and Stegun, 7.1.26, the last factor is e^(-x^2 / 2) times a polynomial of t = 1 / (1 + 0.3 |x|), here a
// minimax one with a relative error of 1.3e-7.
static inline F gelu(F x) {
  const F size = abs(x), t = div(set1(1.0f), fma(size, set1(0.3f), set1(1.0f)));
  F p = set1(3.6036458e-2f);
  p = fma(p, t, set1(-1.587142e-1f));
  p = fma(p, t, set1(2.0896553e-1f));
  p = fma(p, t, set1(-5.6096654e-2f));
  p = fma(p, t, set1(1.2984379e-1f));
  p = fma(p, t, set1(9.952296e-2f));
  p = fma(p, t, set1(1.2081691e-1f));
  p = fma(p, t, set1(1.19625166e-1f));
  const F rest = mul(mul(size, mul(p, t)), exp(mul(mul(x, x), set1(-0.5f))));
  return sub(max(x, zero()), rest);
}

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) = 2 artanh(u / (2 + u)), whose argument is at most
// 1 / 3, so that eight terms of the series suffice.
static inline F softplus(F x) {
  const F u = exp(neg(abs(x)));
  const F s = div(u, add(set1(2.0f), u)), square = mul(s, s);
  F p = set1(1.0f / 15);
  p = fma(p, square, set1(1.0f / 13));
  p = fma(p, square, set1(1.0f / 11));
  p = fma(p, square, set1(1.0f / 9));
  p = fma(p, square, set1(1.0f / 7));
  p = fma(p, square, set1(1.0f / 5));
  p = fma(p, square, set1(1.0f / 3));
  p = fma(p, square, set1(1.0f));
  return fma(mul(s, set1(2.0f)), p, max(x, zero()));
}

// e^x for x <= 0, for results that are rounded to bfloat16: a relative error below 1e-5, 1 at 0, and 0 below -87.3. 2^n * p(r)
// with r in [-1/2, 1/2] and p a minimax polynomial of degree 4 for 2^r.
static inline F exp_to_bf16(F x) {
  const F lowest = set1(-87.3f);
  const F power = mul(max(x, lowest), set1(1.44269504088896341f)), n = round_even(power), r = sub(power, n);
  F p = set1(9.5828529447e-3f);
  p = fma(p, r, set1(5.5906426162e-2f));
  p = fma(p, r, set1(2.4024099112e-1f));
  p = fma(p, r, set1(6.9312417507e-1f));
  p = fma(p, r, set1(1.0f));
  return select(less(x, lowest), zero(), times_pow2i(p, n));
}

}  // namespace chairlift::CHAIRLIFT_ISA
