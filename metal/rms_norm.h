// One element of an RMS norm, rounded where mx.fast.rms_norm rounds it: the normalised element to R,
// the type of the result, and its product with the weight to R again.
template <typename R>
METAL_FUNC float rms_normed(float x, float inverse_rms, float weight) {
  return float(R(float(R(x * inverse_rms)) * weight));
}
