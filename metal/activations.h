// Functions of one float, in float32.

// e^x.
METAL_FUNC float exponential(float x) {
  return metal::precise::exp2(x * 1.44269504f);
}

METAL_FUNC float sigmoid(float x) {
  return metal::precise::divide(1.0f, 1.0f + exponential(-x));
}

// The sigmoid linear unit x / (1 + e^-x).
METAL_FUNC float silu(float x) {
  return metal::precise::divide(x, 1.0f + exponential(-x));
}

// gelu by tanh: (1 + tanh(z)) / 2 is the sigmoid of 2 z.
METAL_FUNC float gelu(float x) {
  return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
}

// log(1 + e^x).  Where 1 + e rounds, e / ((1 + e) - 1) makes up for it (Kahan).
METAL_FUNC float softplus(float x) {
  const float e = exponential(x > 0.0f ? -x : x);
  const float sum = 1.0f + e;
  const float of_sum = 0.693147181f * metal::precise::log2(sum);
  const float of_exact = sum == 1.0f ? e : of_sum * metal::precise::divide(e, sum - 1.0f);
  return metal::max(x, 0.0f) + of_exact;
}
