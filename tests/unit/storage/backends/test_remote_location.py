"""URLs of object stores."""

import pytest

from services.storage.backends.remote_location import RemoteLocation, parse_remote
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket/some/prefix/", RemoteLocation("s3", "bucket", "some/prefix")),
        ("s3://my.bucket-1", RemoteLocation("s3", "my.bucket-1")),
        ("gs://bucket/p", RemoteLocation("gs", "bucket", "p")),
        ("az://container/p", RemoteLocation("az", "container", "p")),
        ("file:///var/cache/kv", RemoteLocation("file", "", "/var/cache/kv")),
        ("file://localhost/srv/a%20b", RemoteLocation("file", "", "/srv/a b")),
        ("memory://", RemoteLocation("memory")),
    ],
)
def test_each_form_is_understood(url: str, location: RemoteLocation) -> None:
    """Scheme, bucket and prefix come out; slashes at the end mean nothing."""
    assert parse_remote(url) == location


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bucket/prefix", "no scheme"),
        ("https://bucket/prefix", "begins with https"),
        ("s3://", "not the name of a bucket"),
        ("s3:///prefix", "not the name of a bucket"),
        ("s3://bucket:9000/p", "not the name of a bucket"),
        ("s3://bucket/a//b", "empty"),
        ("s3://bucket/../b", "'..'"),
        ("s3://bucket/%0a", "unprintable"),
        ("s3://bucket/p?region=x", "query"),
        ("file://server/share", "names a host"),
        ("file:///", "names no directory"),
        ("memory://name", "takes no name"),
        ("s3://[bad", "not a URL"),
    ],
)
def test_what_makes_no_sense_is_a_config_error(url: str, said: str) -> None:
    """The error says what is wrong with the URL."""
    with pytest.raises(ConfigError) as raised:
        parse_remote(url)

    assert said in raised.value.message


def test_every_fault_is_told_at_once() -> None:
    """A bad bucket, a bad path and a query are three faults in one error."""
    with pytest.raises(ConfigError) as raised:
        parse_remote("s3://_/a/../b?x=1")

    assert raised.value.message.count(";") == 2


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    """The error does not show the secret that it complains about."""
    with pytest.raises(ConfigError) as raised:
        parse_remote("s3://AKIAKEY:hunter2@bucket/p")

    assert "credentials" in raised.value.message
    assert "hunter2" not in raised.value.message
    assert "AKIAKEY" not in raised.value.message


@pytest.mark.parametrize("url", ["s3://bucket/p/q", "s3://bucket", "file:///srv/kv", "memory://"])
def test_a_location_reads_as_its_url(url: str) -> None:
    """What logs show can be pasted back."""
    assert str(parse_remote(url)) == url
