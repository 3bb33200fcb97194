"""On a GPU: are HYLA, relational and linear attention right there, and how fast are they?

    python benchmarks/gpu.py [--lengths 512 2048] [--json FILE]

First parity: every implementation in float32, bfloat16 and float16, output and gradients, beside the reference in
float64; its error may be three times that of the reference in the same dtype.  Then time, forward and with gradients,
beside PyTorch's softmax attention: the median of CUDA events.  The exit code is 1 if a number is wrong.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F

from polyhead.ops.registry import IMPLS, resolve

OPTIONS = {
    "hyla": [{"causal": True}, {"causal": False}, {"causal": True, "normalise": "identity", "act": "identity"}],
    "relational": [{"causal": True}, {"causal": False}, {"causal": True, "relation_act": "relu"}],
    "linear": [{"causal": True}, {"causal": False}],
}
SLACK = {torch.float32: 2e-3, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}  # float32 may be computed in tf32
SKIPPED = ("reference", "native")
TIMED = {"hyla": ("triton", "blocked"), "relational": ("sdpa", "blocked"), "linear": ("chunked",)}


def tensors_of(op, b, t, d, dtype, device):
    """The tensors of an op, with gradients: 8 heads."""
    torch.manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    q, k, v = (randn(b, t, 8, d) for _ in range(3))
    if op == "relational":
        return [q, k, randn(b, t, 8, d), randn(b, t, 8, d), v, randn(8, d, 8)]
    return [q, k, v]


def output_and_gradients(op, impl, tensors, options):
    out = resolve(op, impl)(*tensors, **options)
    cotangent = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, cotangent)]


def parity_rows(device, lengths=(1, 17, 130)):
    """A row for each implementation, dtype, length and options, with the worst of its errors over what is allowed."""
    for op, all_options in OPTIONS.items():
        for dtype, slack in SLACK.items():
            for t in lengths:
                for options in all_options:
                    tensors = tensors_of(op, 2, t, 32, dtype, device)
                    exact_tensors = [x.detach().double().requires_grad_() for x in tensors]
                    exact = output_and_gradients(op, "reference", exact_tensors, options)
                    plain = output_and_gradients(op, "reference", tensors, options)
                    for impl in ("auto", *(name for name in IMPLS[op] if name not in SKIPPED)):
                        row = {"op": op, "impl": impl, "dtype": str(dtype), "t": t, "options": str(options)}
                        try:
                            results = output_and_gradients(op, impl, tensors, options)
                        except ValueError as error:  # the implementation refuses the call in one line
                            yield row | {"refused": str(error)}
                            continue
                        worst = 0.0
                        for result, reference, expected in zip(results, plain, exact, strict=True):
                            allowed = 3 * (reference.double() - expected).norm() + slack * expected.norm() + 1e-30
                            worst = max(worst, ((result.double() - expected).norm() / allowed).nan_to_num(1e9).item())
                        yield row | {"error over allowed": worst}


def median_ms(function, device, repeats=20):
    """The median time of a call."""
    times = []
    for _ in range(repeats + 3):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def torch_attention(q, k, v):
    """PyTorch's own causal softmax attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def speed_rows(device, lengths, dtype=torch.bfloat16):
    """A row for each op, implementation and length: ms forward and with gradients, and their ratios to PyTorch's."""
    for op in OPTIONS:
        for t in lengths:
            tensors = tensors_of(op, 4, t, 64, dtype, device)
            qkv = tensors_of("softmax", 4, t, 64, dtype, device)
            functions = {"torch": (torch_attention, qkv)}
            for impl in TIMED[op]:
                functions[impl] = (lambda *x, op=op, impl=impl: resolve(op, impl)(*x, causal=True)), tensors
            base = {}
            for impl, (function, inputs) in functions.items():
                try:
                    out = function(*inputs)
                except ValueError as error:
                    yield {"op": op, "impl": impl, "t": t, "refused": str(error)}
                    continue
                cotangent = torch.ones_like(out)
                passes = {
                    "forward": lambda f=function, x=inputs: f(*(y.detach() for y in x)),
                    "with gradients": lambda f=function, x=inputs, c=cotangent: torch.autograd.grad(f(*x), x, c),
                }
                row = {"op": op, "impl": impl, "t": t}
                for name, run in passes.items():
                    ms = median_ms(run, device)
                    base.setdefault(name, ms)
                    row |= {f"{name} ms": ms, f"{name} over torch": ms / base[name]}
                yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--device", default="cuda", help="cpu tries the script without a GPU")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows, num_wrong = [], 0
    for generator in (parity_rows(device), speed_rows(device, options.lengths)):
        for row in generator:
            rows.append(row)
            is_wrong = row.get("error over allowed", 0.0) > 1
            num_wrong += is_wrong
            print("WRONG" if is_wrong else "", *row.values(), flush=True)
    if options.json:
        card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        about = {"card": card, "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
