"""A back end of ``torch.distributed`` over Horovod's engines: ``torch.distributed.init_process_group("horovod")``.

    registration    gives PyTorch the back end's name
    making          makes a group when PyTorch asks for one
    store           the ranks of a group find each other through the group's store
    membership      a group becomes a process set of the runtime, which it starts if that does not run
    base            what a group is: its operations, its time limit, its end
    group           a ProcessGroup in Python
    backend         a Backend in Python, from PyTorch 2.15 on: one of those of a group, or what such a ProcessGroup has in C++
    splitting       a group of some ranks of another
    operations      each operation of c10d as a collective of the core; sparse has one of its own
    submission      makes requests of tensors, and submits them
    work, futures   what a call returns
    point_to_point  send and recv, which need no other rank

Calls have no names. A group counts all of them together, so ranks that call different operations get an error at once.
"""
