"""The old ``spikingjelly.clock_driven.surrogate``."""

from spikingjelly.activation_based import surrogate as _host

from sj_tac.compat import surrogates
from sj_tac.compat.clock_driven import lost

surrogates.accept_old_signature()

heaviside = _host.heaviside
check_manual_grad = _host.check_manual_grad
SurrogateFunctionBase = _host.SurrogateFunctionBase
MultiArgsSurrogateFunctionBase = surrogates.MultiArgsSurrogateFunctionBase

piecewise_quadratic, PiecewiseQuadratic = _host.piecewise_quadratic, _host.PiecewiseQuadratic
piecewise_exp, PiecewiseExp = _host.piecewise_exp, _host.PiecewiseExp
sigmoid, Sigmoid = _host.sigmoid, _host.Sigmoid
soft_sign, SoftSign = _host.soft_sign, _host.SoftSign
atan, ATan = _host.atan, _host.ATan
nonzero_sign_log_abs, NonzeroSignLogAbs = _host.nonzero_sign_log_abs, _host.NonzeroSignLogAbs
erf, Erf = _host.erf, _host.Erf
piecewise_leaky_relu, PiecewiseLeakyReLU = surrogates.piecewise_leaky_relu, surrogates.PiecewiseLeakyReLU
squarewave_fourier_series, SquarewaveFourierSeries = _host.squarewave_fourier_series, _host.SquarewaveFourierSeries
s2nn, S2NN = _host.s2nn, _host.S2NN
q_pseudo_spike, QPseudoSpike = _host.q_pseudo_spike, _host.QPseudoSpike

__getattr__ = lost(
    "spikingjelly.clock_driven.surrogate",
    {"check_cuda_grad": "it compared the torch and cupy backends, and there is one backend now"},
)
