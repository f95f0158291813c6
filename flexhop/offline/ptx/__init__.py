"""An emulator of GPUs, for PTX.

`parse` reads a kernel, and `Machine` runs one program of a grid. Instructions are in `arithmetic`
and `bits` (of one thread), `accesses` (memory), `flow` (branches, barriers, lanes), `transfers`
(asynchronous copies) and `matrices`. All but branches work on many threads at once, in numpy.
"""
