"""An emulator of Triton's PTX on a CPU: all threads of some blocks in lockstep, in NumPy.

It covers what Triton's interpreter does not: rounding to bf16, fp16 and tf32, fragments of the tensor cores, layouts in
shared memory, asynchronous copies, barriers.  A `Fault` is raised for an address outside the launch's tensors, an
unaligned address, and a barrier that some threads do not reach.  Accesses of two warps to one byte of shared memory
between two barriers are recorded as a race.  PTX is not machine code: the output of `ptxas` is not tested.
"""
