"""Analysis of what the heads learned: taps, latent codes, value networks, probes and maps.

layers = capture(model, batch)                     one Taps per layer
codes(layers[-1], -1, -1)                          the latent code of the last token attending to itself, (b h)
value_network(layers[-1], -1, -1)                  the matrices that this code makes
probe(codes, labels, train=..., test=...)          how well a linear probe predicts labels from the code
probe_layers(taps, labels, -1, -1)                 the same for any label, in every layer of any model
embed(codes)                                       a two-dimensional map of codes
zero_heads(model, task)                            the drop of the score without a head
swap_codes(model, task)                            the output with the code of another sequence
mix_codes(model, task)                             the output with mixtures of both codes
look(model, batch, sample=0)                       attention, relations and symbols of every layer, for one input

`query_codes`, `probe_model` and `clusters` use the pairs that a task recommends.
`targets` gives a batch's labels, `views` a task's pairs.
"""

from polyhead.analysis.ablate import zero_heads
from polyhead.analysis.capture import capture, codes
from polyhead.analysis.geometry import embed, means, purity, similarity
from polyhead.analysis.labels import targets, views
from polyhead.analysis.probe import Probe, clusters, probe, probe_layers, probe_model, query_codes
from polyhead.analysis.relations import look
from polyhead.analysis.swap import mix_codes, swap_codes
from polyhead.analysis.values import ValueNetwork, value_network

__all__ = ["Probe", "ValueNetwork", "capture", "clusters", "codes", "embed", "look", "means", "mix_codes", "probe"]
__all__ += ["probe_layers", "probe_model", "purity", "query_codes", "similarity", "swap_codes", "targets"]
__all__ += ["value_network", "views", "zero_heads"]
