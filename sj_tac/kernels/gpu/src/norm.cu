// The affine map of a BatchNorm in eval mode, in torch's own order of operations. weight and bias may be null; so may
// ``saved`` [2, channels], where what its gradients take goes: 1 / sqrt(var + eps), and minus the mean.

extern "C" __global__ void __launch_bounds__(BLOCK) norm_affine(
    const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ mean,
    const float* __restrict__ var, float* __restrict__ scale, float* __restrict__ shift, float* __restrict__ saved,
    float eps, int channels) {
    const int c = blockIdx.x * BLOCK + threadIdx.x;
    if (c >= channels) return;
    const float invstd = 1.0f / sqrtf(var[c] + eps);
    const float factor = weight ? weight[c] * invstd : invstd;
    const float offset = -mean[c] * factor;
    scale[c] = factor;
    if (saved) saved[c] = invstd, saved[channels + c] = -mean[c];
    shift[c] = bias ? bias[c] + offset : offset;
}
