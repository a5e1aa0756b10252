"""send and recv: messages between two ranks.

    messages    the protocol between the two ranks
    matching    matches messages and receives; pure
    peers       endpoints, and connections to the ranks that this one sends to
    receiving, sending, wire
                both halves of a mailbox, and their shared selector
    mailbox     the thread that sends and receives all messages of this process
    operations  send and recv as methods of a group

The connections of the core only carry what all ranks of a process set have agreed on. Only two ranks know of a send, so
messages use separate connections, which are made when they are first needed.
"""
