"""Where the memory of a tensor is: on a device, on the host, pinned, or mapped from a file.

``memory_kind``: where a shard lies, and what is made beside it. ``offloading``: ``offload`` and ``reopen``.
``atomic_directory``: a directory of files that is visible when it is complete, or never.

Imports ``layout`` and below; imported by ``sharding``, ``training`` and ``checkpoint``.
"""
