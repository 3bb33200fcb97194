"""What the heads learned: taps, latent codes, value networks, probes and maps.

layers = capture(model, batch)                     one Taps per layer
codes(layers[-1], -1, -1)                          the latent code of the last token attending to itself, (b h)
value_network(layers[-1], -1, -1)                  the matrices that this code makes
probe(codes, labels, train=..., test=...)          what can be read off the code
embed(codes)                                       a map of it
"""

from polyhead.analysis.capture import capture, codes
from polyhead.analysis.geometry import embed, similarity
from polyhead.analysis.probe import Probe, probe, probe_model, probe_run, query_codes
from polyhead.analysis.values import ValueNetwork, value_network

__all__ = [
    "Probe",
    "ValueNetwork",
    "capture",
    "codes",
    "embed",
    "probe",
    "probe_model",
    "probe_run",
    "query_codes",
    "similarity",
    "value_network",
]
