"""PTX, as Triton makes it for a card, run on a CPU: all threads of some blocks in lockstep, in NumPy.

What a card does and Triton's interpreter does not: rounding to bf16, fp16 and tf32, fragments of the tensor cores,
layouts in shared memory, copies that land when they are waited for, barriers.  A `Fault` is raised for an address
outside of the launch's tensors, one that is not aligned, and a barrier that not all threads reach; what two warps do to
one byte of shared memory between two barriers is noted as a race.  PTX is not yet the machine's code: what `ptxas`
makes of it is not tried.
"""
