# %% [markdown]
# # Which heads compare?
#
# Three shapes stand in a line: a row, a column or a diagonal. Do the outer two match, while the middle one differs?
# Training shows one family of shapes, the test another. Softmax heads pass on what a token contains. Disentangled heads
# pass on how two tokens compare.

# %%
import matplotlib.pyplot as plt
import torch

import polyhead as ph

task = ph.tasks.RelationalGames("between")
batch = task.batch("novel", 6, seed=0, step=0)
figure, grid = plt.subplots(1, 6, figsize=(9, 1.8))
for axes, image, answer in zip(grid, batch.inputs, batch.targets.flatten(), strict=True):
    axes.imshow(image.permute(1, 2, 0).numpy())
    axes.set(title="yes" if answer else "no", xticks=[], yticks=[])

# %% [markdown]
# ## Train both kinds
#
# Two layers of width 64 with four heads. The second network has two disentangled heads in place of two softmax heads.
# The symbols of disentangled heads stand for positions. Softmax heads know none here; with `positions=ph.Rotary()` they
# reach 0.65 in 600 steps.


# %%
def train(heads, steps=150):
    """The network after some steps, and its accuracy on new shapes every ten steps."""
    torch.manual_seed(0)
    model = ph.Transformer(ph.TransformerConfig(*task.ends, dim=64, layers=2, heads=heads))
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    test = task.batch("novel", 200, seed=0, step=0)
    accuracies = []
    for step in range(steps + 1):
        if step % 10 == 0:
            with torch.no_grad():
                accuracies.append(task.metrics(model(test.inputs), test)["accuracy"].mean().item())
        batch = task.batch("train", 64, seed=0, step=step)
        task.loss(model(batch.inputs), batch).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model, accuracies


softmax, softmax_accuracies = train([ph.Softmax(4)])
mixed, mixed_accuracies = train([ph.Softmax(2), ph.Disentangled(2)])

figure, axes = plt.subplots(figsize=(6, 2.5))
axes.plot(range(0, 151, 10), softmax_accuracies, label="softmax")
axes.plot(range(0, 151, 10), mixed_accuracies, label="softmax + disentangled")
axes.axhline(0.5, color="grey", linestyle="--")
axes.set(xlabel="training steps", ylabel="accuracy, new shapes")
axes.legend()

# %% [markdown]
# ## Look at the relations
#
# A disentangled head has two maps for each pair of tokens: whom it attends to, and how the two compare. Here are both
# for one picture, in the first layer. The picture is cut into patches; each patch is a token.
# Blue relations are positive, red ones negative.

# %%
layer = ph.analysis.look(mixed, batch, sample=0)[0]
group = layer.groups[1]
figure, grid = plt.subplots(1, 2, figsize=(6, 2.8))
grid[0].imshow(group.attention[0], cmap="Greys")
grid[0].set(title="attention of head 1", xlabel="key", ylabel="query")
largest = abs(group.relations[0]).max()
shown = grid[1].imshow(group.relations[0], cmap="RdBu", vmin=-largest, vmax=largest)
figure.colorbar(shown)
grid[1].set(title="relation of head 1", xlabel="key")

# %% [markdown]
# Five seeds, all five games, and other models:
# [results](../results/index.md#do-relational-and-disentangled-heads-compare-objects-better).
