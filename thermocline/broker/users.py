"""The users of a cell, and the ``authorization`` block of a server that knows them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thermocline.broker.passwords import OPERATOR
from thermocline.broker.permissions import ANY, OF_KIND, OF_MEMBER, Permissions, inbox
from thermocline.broker.quoting import nats_quoted


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
    inboxes = {kind: [inbox(kind)] for kind in OF_KIND}
    for kind, ids in (("worker", workers), ("storage", storages)):
        names = [kind if process_id == ANY else process_id for process_id in ids]
        users += [User(name, OF_MEMBER[kind](name, each)) for name, each in zip(names, ids, strict=True)]
        inboxes[kind] = [inbox(name) for name in names]
    users = [User(user.name, _answering(user.permissions, inboxes)) for user in users]
    names = [user.name for user in users]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two users would be called {', '.join(twice)}")
    return tuple(users)


def _answering(permissions: Permissions, inboxes: Mapping[str, Sequence[str]]) -> Permissions:
    """Return ``permissions`` with the right to publish into the inboxes of the kinds that it answers."""
    answered = [subjects for kind in permissions.answers for subjects in inboxes[kind]]
    return replace(permissions, publish=(*permissions.publish, *answered))


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
                },
            }
            for user in users
        ]
    }


def authorization_text(users: Sequence[User], passwords: Mapping[str, str]) -> str:
    """Return the ``authorization`` block for ``users`` as text.

    ``passwords`` are by user name, in the form of the file: :func:`nats_quoted`, or ``$VARIABLE``.
    """
    lines = ["authorization {", "  users: ["]
    for entry in authorization(users, passwords)["users"]:
        permissions = entry["permissions"]
        lines += [
            "    {",
            f"      user: {nats_quoted(entry['user'])}",
            f"      password: {entry['password']}",
            "      permissions: {",
            *_subjects("publish", permissions["publish"]),
            *_subjects("subscribe", permissions["subscribe"]),
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _subjects(verb: str, allowed: Sequence[str]) -> list[str]:
    return [f"        {verb}: [", *(f"          {nats_quoted(subject)}" for subject in allowed), "        ]"]
