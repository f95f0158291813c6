"""The decision: which kernel, with which constants, for these shapes."""

def register():
    pass
