"""What is faster on a CPU computes what the plain functions do, and is left to torch.compile where that compiles."""

import pytest
import torch

from train.model.cpu_kernels import faster_in_eager_mode
from train.model.model import rms_norm, rotary_table, rotate


def result_and_gradients(function, *inputs):
    inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    y = function(*inputs)
    weights = torch.linspace(-1, 2, y.numel()).view(y.shape)
    (y * weights).sum().backward()
    return [y, *(tensor.grad for tensor in inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_equal_the_plain_ones_and_so_do_their_gradients(dtype):
    x = (3 * torch.randn(2, 8, 3, 16)).to(dtype)
    weight = torch.rand(16) + 0.5
    rotary = rotary_table(8, 16, 10_000.0).to(dtype)

    def norm(function):
        return lambda x, weight: function(x, weight, 1e-5)

    def turn(function):
        return lambda x: function(x, rotary)

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for chosen, plain, inputs in (
        (norm(rms_norm), norm(rms_norm.__wrapped__), (x, weight)),
        (turn(rotate), turn(rotate.__wrapped__), (x,)),
    ):
        found = result_and_gradients(chosen, *inputs)
        expected = result_and_gradients(plain, *inputs)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert (one - other).norm() <= tolerance * other.norm()


def test_a_kernel_is_used_on_its_devices_and_outside_of_torch_compile():
    @faster_in_eager_mode(lambda x: x + 1)
    def add_two(x):
        return x + 2

    x = torch.zeros(1)
    assert add_two(x).item() == 1
    assert torch.compile(add_two, backend="eager", fullgraph=True)(x).item() == 2
    assert faster_in_eager_mode(lambda x: x + 1, ("cuda",))(add_two.__wrapped__)(x).item() == 2
