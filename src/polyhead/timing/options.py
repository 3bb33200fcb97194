"""The options of `polyhead bench`; the command line shows them without importing torch."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polyhead.spec.lazy import own_names
from polyhead.spec.shapes import check_number, one_of

__dir__ = own_names(__name__)

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")
LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
REPEATS = {"cpu": 3, "cuda": 20}


@dataclass(frozen=True)
class Options:
    """What to measure; `settled` fills in defaults of the device and raises ValueError for invalid options."""

    op: str
    """softmax, linear, hyla, relational, disentangled, abstractor or pooled."""
    lengths: tuple[int, ...] = ()
    """Tokens (default: 256 to 2048 on a CPU, to 16384 on a GPU)."""
    batch: int = 1
    """Sequences."""
    heads: int = 8
    """Heads of the op."""
    dim: int = 64
    """Width of a head."""
    relations: int = 8
    """Relations of relational heads, each heads x dim / relations wide."""
    causal: bool = True
    """Each query sees no later key."""
    window: int | None = None
    """Only keys less than this many positions away (stock attention has no window)."""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64 (default: float32 on a CPU, bfloat16 on a GPU)."""
    device: str = "auto"
    """auto, cpu or cuda."""
    threads: int = 1
    """On a CPU; one is timed in CPU time, several in elapsed time."""
    fast_products: bool = True
    """On a CPU, matrix products by oneDNN if it is faster and as exact, for everything that is timed."""
    repeats: int | None = None
    """Repetitions of each call (default: 3 on a CPU, 20 on a GPU); the table shows the fastest."""
    sides: tuple[str, ...] = ()
    """Impls to time (default: all)."""
    compile: bool | None = None
    """Also time torch.compile(reference) (default: on a GPU)."""
    memory: float | None = None
    """GiB that the reference may use (default: most of the free memory); above, it is skipped."""

    def settled(self) -> "Options":
        """The options with all defaults filled in: ascending lengths, the device's name, memory in GiB."""
        import torch

        from polyhead.ops.dispatch import BACKENDS
        from polyhead.train.device import pick_device

        one_of("bench", "op", self.op, BACKENDS)
        for name in ("batch", "heads", "dim", "relations", "window", "threads", "repeats"):
            if (value := getattr(self, name)) is not None:
                check_number("bench", name, value, 1)
        if any(t < 1 for t in self.lengths):
            raise ValueError(f"bench: lengths must be at least 1 but one is {min(self.lengths)}")
        if self.memory is not None and not self.memory > 0:
            raise ValueError(f"bench: memory must be above 0 GiB but is {self.memory}")
        if self.op == "relational" and self.heads * self.dim % self.relations:
            width = self.heads * self.dim
            raise ValueError(f"bench: relations must divide heads x dim = {width} but are {self.relations}")
        cpu = self.device == "auto" and not torch.cuda.is_available()
        device = pick_device("cpu" if cpu else self.device)
        if device.type not in LENGTHS:
            raise ValueError(f"bench: can time cpu and cuda, not {device.type}")
        gpu = device.type == "cuda"
        dtype = self.dtype or ("bfloat16" if gpu else "float32")
        compiled = gpu and not self.sides if self.compile is None else self.compile
        return replace(
            self,
            lengths=tuple(sorted(set(self.lengths or LENGTHS[device.type]))),
            dtype=one_of("bench", "dtype", dtype, DTYPES),
            device=str(device),
            repeats=self.repeats or REPEATS[device.type],
            compile=compiled or "compiled" in self.sides,
            memory=available(device) / 2**30 if self.memory is None else self.memory,
        )


def available(device: "torch.device") -> float:
    """Bytes that a measurement may use: most of the free memory."""
    import torch

    if device.type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except OSError:  # not Linux
        return 8.0 * 2**30
    return 0.8 * kib * 2**10
