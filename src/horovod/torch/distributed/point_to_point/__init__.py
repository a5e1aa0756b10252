"""send and recv: messages between two ranks, which no other rank takes part in.

    messages    what two ranks say to each other
    matching    which message is for which receive; pure
    peers       connections to the ranks that this one sends to
    receiving, sending, wire
                both halves of a mailbox, and what they share
    mailbox     the thread that carries all messages of this process
    operations  what a group offers

The connections of the core carry what all ranks of a process set have agreed on. A send is known to two ranks alone, so it has
connections of its own, which are made when they are first needed.
"""
