"""Peaks, memory and links of the cards that `polyhead plan` knows, and of the local device.

Sources are NVIDIA's data sheets, without sparsity: H200 (2024), H100 SXM (2023), A100 SXM with 40 and 80 GB (2021), L4
(2023); and the white paper of the Ada architecture (RTX 4090).  Link bandwidths are for one direction: NVLink 4 and 3
(900 and 600 GB/s for both directions), PCIe 4 x16.  Between machines: 400 Gb/s per GPU (DGX H100, DGX H200), 200 Gb/s
(DGX A100); for cards without such a system we assume 100 Gb/s per machine of 8.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from polyhead.spec.shapes import one_of
from polyhead.train import throughput

GB = 1e9
"""Bytes per GB in data sheets; the real memory of a card is a few per cent larger."""

MACHINE = 8
"""Devices in a machine; more devices communicate over the network."""


@dataclass(frozen=True)
class Card:
    """A device: operations per second (`narrow`: bf16 and fp16), bytes, bytes per second; `full`: its full name."""

    name: str
    full: str
    fp32: float
    narrow: float
    memory: float
    bandwidth: float
    link: float
    network: float
    source: str = "the vendor's data sheet"

    @property
    def is_cpu(self) -> bool:
        return self.full == "cpu"

    def between(self, devices: int) -> float:
        """Bytes per second that each of `devices` devices can send."""
        return self.link if devices <= MACHINE else min(self.link, self.network)

    def seconds(self, operations: int, moved: int, narrow: bool) -> float:
        """Seconds of a kernel by the roofline: the maximum of compute and memory time (Williams et al. 2009)."""
        return max(operations / (self.narrow if narrow else self.fp32), moved / self.bandwidth)


def _card(name: str, full: str, sizes: tuple[float, float, float], link: float, network: float) -> Card:
    """A card.  `sizes`: fp32 operations per second, bytes, bytes per second.  The bf16 peak: `throughput.peak`."""
    narrow = throughput.peak(full)
    assert narrow is not None, full
    fp32, memory, bandwidth = sizes
    return Card(name, full, fp32, narrow, memory, bandwidth, link, network)


CARDS = {
    card.name: card
    for card in (
        _card("h100", "NVIDIA H100 80GB HBM3", (67e12, 80 * GB, 3.35e12), 450e9, 50e9),
        _card("h200", "NVIDIA H200", (67e12, 141 * GB, 4.8e12), 450e9, 50e9),
        _card("a100", "NVIDIA A100-SXM4-80GB", (19.5e12, 80 * GB, 2.039e12), 300e9, 25e9),
        _card("a100-40", "NVIDIA A100-SXM4-40GB", (19.5e12, 40 * GB, 1.555e12), 300e9, 25e9),
        _card("l4", "NVIDIA L4", (30.3e12, 24 * GB, 0.3e12), 32e9, 12.5e9 / MACHINE),
        _card("rtx4090", "NVIDIA GeForce RTX 4090", (82.6e12, 24 * GB, 1.008e12), 32e9, 12.5e9 / MACHINE),
    )
}


def card(name: str) -> Card:
    """A card by name; "this" is the local device.  Raises ValueError with the nearest name.

    >>> card("h100").memory, card("h100").between(8), card("h100").between(64)
    (80000000000.0, 450000000000.0, 50000000000.0)
    """
    if one_of("plan", "card", name, (*CARDS, "this")) == "this":
        return this()
    return CARDS[name]


def this() -> Card:
    """The local GPU, from its data sheet or measured; without a GPU the local processor, measured."""
    if not torch.cuda.is_available():
        return _measured("cpu", _main_memory())
    full, memory = torch.cuda.get_device_name(), float(torch.cuda.get_device_properties().total_memory)
    known = [one for one in CARDS.values() if one.full == full]  # an L40S is no L4, and a MIG slice no whole card
    return known[0] if known else _measured(full, memory)


def _main_memory() -> float:
    """Bytes of main memory; infinite if unknown."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _measured(full: str, memory: float) -> Card:
    device, n, much = ("cpu", 512, 2**20) if full == "cpu" else ("cuda", 8192, 2**28)
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(n, n, device=device, dtype=dtype)
        rates.append(2 * n**3 / quickest(lambda x=x: x @ x))  # type: ignore[misc]
    source, target = torch.ones(2, much, device=device)
    bandwidth = 2 * source.nbytes / quickest(lambda: target.copy_(source))
    name = "this machine" if full == "cpu" else "this"
    fp32, narrow = rates
    return Card(name, full, fp32, narrow, memory, bandwidth, 1e9, 1e9, "measured here: a matrix product, a copy")


def quickest(call: Callable[[], object], times: int = 8) -> float:
    """Seconds of the fastest of some calls, after a warm-up call."""
    call()
    clock, found = clock_here(), []
    for _ in range(times):
        start = clock()
        call()
        found.append(clock() - start)
    return min(found)


def clock_here() -> Callable[[], float]:
    """The clock for timings: on a processor CPU time of one thread, so other processes do not count; else wall time."""
    if not torch.cuda.is_available():
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock
