"""``thermocline keys VERB``: make, add, revoke and list the API keys of tenants.

Gateways see a change of the file within a second. A key is printed once, when it is made; the file holds its digest.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from services.gateway.keys import check_given_key, key_hash, key_id, new_key, new_salt
from services.gateway.tenant_file import read_tenants, sole_writer, write_tenants
from services.gateway.tenants import LIMITS, MAX_BYTES, MAX_KEYS, MAX_TENANTS, QUOTAS, Tenant, name_fault
from shared.arguments import ArgumentParser
from shared.config import parse_bytes
from shared.errors import InvalidRequest, NotFound, OperatorError, ThermoclineError
from shared.guard import guarded
from thermocline.cache import argument_types
from thermocline.cache.tables import table

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
FILE_VARIABLE = "THERMOCLINE_TENANTS"

TenantTable = dict[str, Tenant]

_LIMIT_HELP = {
    "requests_per_minute": "requests a minute; 0 is no limit",
    "tokens_per_minute": "tokens a minute; 0 is no limit",
    "max_concurrent": "requests in flight; 0 is no limit",
    "max_queued": "requests waiting; 0 is no limit",
    "max_priority": "highest priority that requests may ask for",
    "max_leased_tokens": "tokens that leases may keep; 0 is none",
    "device_bytes": "KV on devices; 0 is no limit",
    "host_bytes": "KV in host memory; 0 is no limit",
    "disk_bytes": "KV on disks; 0 is no limit",
    "remote_bytes": "KV in object stores; 0 is no limit",
}


def new(arguments: argparse.Namespace) -> None:
    """Make a tenant with a salt of its own, and its first key."""
    fault = name_fault(arguments.tenant)
    if fault:
        raise OperatorError(fault)
    limits = {limit: getattr(arguments, limit) for limit in LIMITS}
    key = _key(arguments)

    def add_tenant(tenants: TenantTable) -> None:
        if arguments.tenant in tenants:
            raise InvalidRequest(f"there is a tenant {arguments.tenant} already; add gives it one more key")
        if len(tenants) >= MAX_TENANTS:
            raise InvalidRequest(f"a file holds {MAX_TENANTS} tenants at the most")
        _check_fresh(tenants, key)
        tenants[arguments.tenant] = Tenant(salt=new_salt(), keys=(key_hash(key.encode()),), **limits)

    _change(arguments.file, add_tenant, may_be_new=True)
    _say_key(arguments, key)


def add(arguments: argparse.Namespace) -> None:
    """Add a key to a tenant."""
    key = _key(arguments)

    def add_key(tenants: TenantTable) -> None:
        tenant = _tenant(tenants, arguments.tenant)
        if len(tenant.keys) >= MAX_KEYS:
            raise InvalidRequest(f"a tenant has {MAX_KEYS} keys at the most; revoke one first")
        _check_fresh(tenants, key)
        keys = (*tenant.keys, key_hash(key.encode()))
        tenants[arguments.tenant] = msgspec.structs.replace(tenant, keys=keys)

    _change(arguments.file, add_key)
    _say_key(arguments, key)


def revoke(arguments: argparse.Namespace) -> None:
    """Revoke a key by its id. Requests in flight under it end normally."""

    def remove_key(tenants: TenantTable) -> None:
        tenant = _tenant(tenants, arguments.tenant)
        stay = tuple(hashed for hashed in tenant.keys if key_id(hashed) != arguments.key_id)
        if len(stay) == len(tenant.keys):
            raise NotFound(f"tenant {arguments.tenant} has no key {arguments.key_id}")
        tenants[arguments.tenant] = msgspec.structs.replace(tenant, keys=stay)

    _change(arguments.file, remove_key)
    print(f"key {arguments.key_id} of {arguments.tenant} is revoked", file=sys.stderr)


def ls(arguments: argparse.Namespace) -> None:
    """List tenants, the ids of their keys, and their limits."""
    _, tenants = read_tenants(arguments.file)
    rows = [
        [name, *(str(getattr(tenant, limit) or "-") for limit in LIMITS), " ".join(map(key_id, tenant.keys)) or "-"]
        for name, tenant in tenants.items()
    ]
    print("\n".join(table(["tenant", *LIMITS, "keys"], rows)))


def _change(path: Path, change: Callable[[TenantTable], None], *, may_be_new: bool = False) -> None:
    with sole_writer(path):
        tenants = {} if may_be_new and not path.exists() else read_tenants(path)[1]
        change(tenants)
        write_tenants(path, tenants)


def _tenant(tenants: TenantTable, name: str) -> Tenant:
    if name not in tenants:
        raise NotFound(f"there is no tenant {name}")
    return tenants[name]


def _check_fresh(tenants: TenantTable, key: str) -> None:
    hashed = key_hash(key.encode())
    for name, tenant in tenants.items():
        if hashed in tenant.keys:
            raise InvalidRequest(f"tenant {name} has this key already")


def _key(arguments: argparse.Namespace) -> str:
    if not arguments.stdin:
        return new_key()
    key = sys.stdin.readline().strip()
    check_given_key(key)
    return key


def _say_key(arguments: argparse.Namespace, key: str) -> None:
    hashed = key_hash(key.encode())
    print(f"key {key_id(hashed)} of {arguments.tenant}", file=sys.stderr, flush=True)
    if not arguments.stdin:
        print(key)


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(
        prog="thermocline keys",
        description="Make, add, revoke and list API keys of tenants. Gateways read a changed file within a second.",
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    for run in (new, add, revoke, ls):
        verb = verbs.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        verb.set_defaults(run=run)
        default = os.environ.get(FILE_VARIABLE)
        verb.add_argument(
            "--file",
            type=Path,
            default=Path(default) if default else None,
            required=not default,
            metavar="FILE",
            help=f"file of tenants, the gateways' --tenants (default: {FILE_VARIABLE})",
        )
        if run is not ls:
            verb.add_argument("tenant", metavar="TENANT", help="name of the tenant")
        if run in (new, add):
            verb.add_argument("--stdin", action="store_true", help="read a key made elsewhere from stdin, as one line")
        if run is new:
            for limit in LIMITS:
                kind, what = (_quota, "SIZE") if limit in QUOTAS else (_limit, "N")
                verb.add_argument(
                    f"--{limit.replace('_', '-')}", metavar=what, type=kind, default=0, help=_LIMIT_HELP[limit]
                )
        if run is revoke:
            verb.add_argument("key_id", metavar="KEY_ID", help="id of the key, which new, add and ls print")
    return made


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 13 and int(text) <= 2**40):
        raise argparse.ArgumentTypeError(f"{text!r} is not a limit: a whole number, 0 or more")
    return int(text)


def _quota(text: str) -> int:
    nbytes = parse_bytes(argument_types.size(text))
    if nbytes > MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is more than any tier has")
    return nbytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done; 1 refused, or the file cannot be written; 2 bad arguments, or a faulty file."""
    arguments = parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except ThermoclineError as error:
        # The reader names the file by the gateways' flag.
        told = error.message.replace(f"--tenants {arguments.file}", f"--file {arguments.file}")
        print(f"thermocline keys: {told}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, OperatorError) else EXIT_FAILED
    except OSError as error:
        print(f"thermocline keys: {arguments.file}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded(main))
