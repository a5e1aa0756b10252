"""Compares values that must be the same on all ranks. All comparisons of ranks are made here, for every framework.

    comparison          compares bytes: one small request, and a second one only if they differ
    alike               what must be the same, and the warnings and errors if it is not
    precision           how far apart values may be that processors round differently
    samples             a few numbers of each step, which go with other agreements
    agreed              which variables the ranks have
    missing_gradients   which gradients the ranks have
    guard               compares an optimizer while it trains, without a wait
    debugging, training_mistakes    what HOROVOD_DEBUG looks for

The bindings read their own tensors, and pass arrays, texts and bytes. These modules import no framework.
"""
