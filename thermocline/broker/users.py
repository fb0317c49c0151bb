"""The users of a cell, and the ``authorization`` block of a server that knows them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thermocline.broker.passwords import OPERATOR
from thermocline.broker.permissions import ANY, OF_KIND, OF_MEMBER, Permissions

_ANSWER_WITHIN = "2m"
"""How long a call may be answered; longer than any caller waits."""


@dataclass(frozen=True, slots=True)
class User:
    """One user of the broker, named after its process, or after the kind where all processes of a kind share it."""

    name: str
    permissions: Permissions


def cell_users(workers: Sequence[str], storages: Sequence[str]) -> tuple[User, ...]:
    """Return a user for the gateways, the schedulers, each worker, each storage and the operator.

    ``ANY`` in place of an id makes one user for all processes of that kind, named after the kind. Raises ValueError
    where two users would have the same name.
    """
    users = [User(kind, permissions(kind)) for kind, permissions in OF_KIND.items()]
    for kind, ids in (("worker", workers), ("storage", storages)):
        for process_id in ids:
            name = kind if process_id == ANY else process_id
            users.append(User(name, OF_MEMBER[kind](name, process_id)))
    names = [user.name for user in users]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two users would be called {', '.join(twice)}")
    return tuple(users)


def quoted(secret: str) -> str:
    """Return a password as a quoted string of the server's configuration language, where JSON strings are valid."""
    return json.dumps(secret)


def variable(name: str) -> str:
    """Return the environment variable of a user's password, for configurations that should hold no secrets."""
    # The operator's variable is also that of a broker with a single user, so that both can be started alike.
    if name == OPERATOR:
        return "TC_NATS_PASSWORD"
    return f"TC_NATS_{name.replace('-', '_').upper()}_PASSWORD"


def authorization(users: Sequence[User], passwords: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``authorization`` block for ``users`` as JSON-compatible data. ``passwords`` are by user name."""
    return {
        "users": [
            {
                "user": user.name,
                "password": passwords[user.name],
                "permissions": {
                    # Reading two streams takes some subjects twice.
                    "publish": list(dict.fromkeys(user.permissions.publish)),
                    "subscribe": list(dict.fromkeys(user.permissions.subscribe)),
                    **({"allow_responses": {"max": 1, "expires": _ANSWER_WITHIN}} if user.permissions.answers else {}),
                },
            }
            for user in users
        ]
    }


def authorization_text(users: Sequence[User], passwords: Mapping[str, str]) -> str:
    """Return the ``authorization`` block for ``users`` as text.

    ``passwords`` are by user name, in the form of the file: :func:`quoted`, or ``$VARIABLE``.
    """
    lines = ["authorization {", "  users: ["]
    for entry in authorization(users, passwords)["users"]:
        permissions = entry["permissions"]
        lines += [
            "    {",
            f"      user: {quoted(entry['user'])}",
            f"      password: {entry['password']}",
            "      permissions: {",
            *_subjects("publish", permissions["publish"]),
            *_subjects("subscribe", permissions["subscribe"]),
        ]
        if "allow_responses" in permissions:
            lines.append(f'        allow_responses: {{max: 1, expires: "{_ANSWER_WITHIN}"}}')
        lines += ["      }", "    }"]
    return "\n".join([*lines, "  ]", "}", ""])


def _subjects(verb: str, allowed: Sequence[str]) -> list[str]:
    return [f"        {verb}: [", *(f"          {quoted(subject)}" for subject in allowed), "        ]"]
