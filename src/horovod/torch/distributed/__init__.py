"""A back end of ``torch.distributed`` over Horovod's engines: ``torch.distributed.init_process_group("horovod")``.

    registration    gives PyTorch the back end's name
    making          makes a group when PyTorch asks for one
    store           exchanges data among the ranks of a group through the group's store
    membership      makes a group a process set of the runtime, and starts the runtime if it does not run
    base            the common base of groups: operations, time limit, end
    group           a ProcessGroup in Python
    backend         a Backend in Python, from PyTorch 2.15 on: one of several back ends of a group, or the one that such a
                    ProcessGroup registers for C++ code
    splitting       makes a group from some ranks of another group
    operations      each operation of c10d as a collective of the core: reductions, movements; sparse has the sum of sparse
                    tensors
    arguments       the forms and names of the operations' arguments
    submission      makes requests of tensors, and submits them
    flat_tensors    how tensors are passed to the core, and results to the caller's tensors
    plain           a shorter path for plain tensors in host memory
    work, futures   the return values of calls
    point_to_point  send and recv, which involve only two ranks

Calls have no names. A group counts all calls together, so ranks that call different operations get an error at once.
"""
