"""Errors of a kernel that runs on the host."""


class HostError(RuntimeError):
    """The host itself could not do what was asked: no compiler, a kernel that does not compile, no
    memory."""


class KernelFault(RuntimeError):
    """A kernel did what no kernel may do.

    kind: a word or two, such as "out of bounds", "race", "divergence".  location: "file:line" in
    the Metal text, or "" if unknown.  threadgroup, thread: positions in the grid and in the
    threadgroup, or None.
    """

    def __init__(
        self,
        kind: str,
        kernel: str,
        message: str,
        location: str = "",
        threadgroup: tuple[int, ...] | None = None,
        thread: tuple[int, ...] | None = None,
    ):
        self.kind = kind
        self.kernel = kernel
        self.location = location
        self.threadgroup = threadgroup
        self.thread = thread
        text = f"{kind} in kernel {kernel}: {message}"
        if location:
            text += f"\n  at {location}"
        if thread is not None:
            text += f"\n  thread {thread} of threadgroup {threadgroup}"
        super().__init__(text)
