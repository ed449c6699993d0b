"""The other users of this machine, as far as they can be found."""

from __future__ import annotations

import os
import pwd
import sys
from typing import Final

import psutil

FIRST_USER_ID: Final = 501 if sys.platform == "darwin" else 1000
NOBODY: Final = 65534
NO_LOGIN: Final = ("nologin", "false")
"""The names of programs that are the shells of accounts without a login."""


def other_users() -> list[str]:
    """The names of the other users that have a login or a running process, without accounts of the system.

    Accounts of a directory service, which cannot be listed, are found by their processes.
    """
    users = {
        entry.pw_uid: entry.pw_name
        for entry in pwd.getpwall()
        if entry.pw_shell and os.path.basename(entry.pw_shell) not in NO_LOGIN
    }
    for process in psutil.process_iter(["uids", "username"]):
        if (uids := process.info["uids"]) is not None:
            users[uids.real] = process.info["username"]
    own = {os.getuid(), NOBODY}
    return sorted(name for uid, name in users.items() if uid >= FIRST_USER_ID and uid not in own)
