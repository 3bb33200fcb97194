# %% [markdown]
# # Reading a latent code
#
# HYLA heads build a small network for each pair of tokens. The *latent code* of a pair, one number for each head, says
# which network. What does a trained model write into its codes? We read them in a network of fuzzy logic that was
# trained for 50,000 steps: it finds a function of two terms in 31 examples.

# %%
import matplotlib.pyplot as plt
import torch

import polyhead as ph

run, model = ph.load("fuzzy-hyla-2")
task = run.task
batch = task.batch("compositional", 64, seed=0, step=0)
taps = ph.analysis.capture(model, batch)
codes = ph.analysis.codes(taps[-1], -1, -1)  # the last token attending to itself: (sequences, heads)
figure, axes = plt.subplots(figsize=(5, 3))
axes.imshow(codes[:20].numpy(), cmap="RdBu", vmin=-3, vmax=3)
axes.set(title="latent codes of 20 sequences", xlabel="head", ylabel="sequence")

# %% [markdown]
# ## The network of a pair
#
# The code makes two matrices: into the hidden layer and out of it.

# %%
network = ph.analysis.value_network(taps[-1], q_index=-1, k_index=3)
print([tuple(matrix.shape) for matrix in network])

# %% [markdown]
# ## Does the code carry the function?
#
# Take two sequences with the same inputs and different functions. Give the last token of the first the code of the
# second, the donor. R² of the output against the function of the sequence itself, and against that of the donor:

# %%
for row in ph.analysis.swap_codes(model, task, pairs=200):
    print(f"{row['code']:<35} own {row['own']:6.2f}   donor {row['donor']:6.2f}")

# %% [markdown]
# In this network the output follows the donor's code. Of the other four, one follows as well:
# [all five](../results/index.md#does-hylas-latent-code-carry-the-function).
#
# ## Can a probe read the terms?
#
# A linear classifier reads the first term of the function from the code, for functions that it was not fitted on. The
# chance level is the same probe on permuted labels.

# %%
layers, probed = ph.analysis.query_codes(model, task, "compositional", 600)
labels = probed.latents["terms"][:, 0]
result = ph.analysis.probe(torch.as_tensor(layers[-1]), labels, train=slice(0, 400), test=slice(400, 600))
print(f"F1 {result.f1:.3f}, chance {result.chance:.3f}")

# %% [markdown]
# This probe, over many queries, reads no term above chance, though the swap shows that the code carries the function.
# For one fixed query a probe does find terms ([codes](../howto/codes.md)). Over all networks this is
# [undecided](../results/index.md#does-training-write-the-task-into-the-latent-code).
