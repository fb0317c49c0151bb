"""What errors of the object-store library mean."""

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from services.storage.backends.store_errors import fault_of, is_missing, lacks_conditional_writes

XML = '<?xml version="1.0" encoding="UTF-8"?><Error>'


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GenericError("Server returned non-2xx status code: 503 Service Unavailable: "), "transient"),
        (GenericError("Server returned non-2xx status code: 429 Too Many Requests: "), "transient"),
        (GenericError("HTTP error: error sending request"), "transient"),
        (GenericError("Server returned non-2xx status code: 400 Bad Request: "), "permanent"),
        (GenericError("Server returned non-2xx status code: 501 Not Implemented: "), "permanent"),
        (PermissionDeniedError("status code: 403 Forbidden"), "permanent"),
        (FileNotFoundError("NoSuchBucket"), "permanent"),
        (GenericError("Server returned non-2xx status code: 507 Insufficient Storage: "), "full"),
        (GenericError("Unable to copy: No space left on device (os error 28)"), "full"),
        (
            GenericError(f"status code: 400 Bad Request: {XML}<Code>XMinioAdminBucketQuotaExceeded</Code></Error>"),
            "full",
        ),
        (PermissionDeniedError(f"status code: 403 Forbidden: {XML}<Code>QuotaExceeded</Code></Error>"), "full"),
        (TimeoutError(), "timed_out"),
        (GenericError(f"status code: 400 Bad Request: {XML}<Code>RequestTimeout</Code></Error>"), "transient"),
        (GenericError(f"status code: 400 Bad Request: {XML}<Code>ThrottlingException</Code></Error>"), "transient"),
        (
            GenericError("Error performing GET http://s/b/k in 1ms - Received redirect without LOCATION, this"),
            "permanent",
        ),
    ],
)
def test_each_error_is_judged(error: Exception, kind: str) -> None:
    """Only what may go away by itself is worth another attempt."""
    assert fault_of(error).kind == kind


def test_secrets_do_not_get_into_texts() -> None:
    """Neither the fault nor the error that gets chained shows a signed query."""
    error = GenericError("error at https://a/b?sv=1&sig=SECRET in 1 ms\n\nDebug source:\nuri: https://a/b?sig=SECRET")

    fault = fault_of(error)

    assert "SECRET" not in fault.text
    assert "SECRET" not in str(error)
    assert fault.text.startswith("error at https://a/b?")


@pytest.mark.parametrize(
    ("code", "message", "way_out"),
    [
        ("ExpiredToken", "The provided token has expired.", "new credentials"),
        ("RequestTimeTooSkewed", "The difference is too large.", "clock"),
        ("SlowDown", "Reduce your request rate.", ""),
    ],
)
def test_the_answer_of_a_store_comes_first_with_a_way_out(code: str, message: str, way_out: str) -> None:
    """Not the request; neither is the answer taken for a query."""
    where = "http://store/bucket/p/ab/cd?X-Amz-Signature=SECRET"
    body = f"{XML}<Code>{code}</Code><Message>{message}</Message><Resource>/b?sig=SECRET</Resource></Error>"
    text = fault_of(GenericError(f"Error performing GET {where} in 1 ms - status code: 400 Bad Request: {body}")).text

    assert text.startswith(f"status code: 400 Bad Request: {code}: {message}")
    assert way_out in text
    assert "SECRET" not in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "The operation lacked the necessary privileges to complete for path p/ab: Error performing GET "
            "http://s:9000/b/p/ab in 1ms - Server returned non-2xx status code: 403 Forbidden: <html>Blocked</html>",
            "status code: 403 Forbidden: <html>Blocked</html>",
        ),
        (
            "Generic S3 error: Error performing GET http://s:9000/b/p/ab in 465.893µs - Received redirect without "
            "LOCATION, this normally indicates an incorrectly configured region",
            "a redirect to nowhere (set AWS_REGION to the region of the bucket)",
        ),
    ],
)
def test_what_the_store_says_comes_first_without_a_document_too(text: str, told: str) -> None:
    """A proxy answers in HTML, and S3 in the wrong region by a redirect without a target."""
    assert fault_of(GenericError(text)).text == told


DEBUG = """

Debug source:
Generic {
    store: "S3",
    source: RetryError(
        RetryErrorImpl {
            method: GET,
            uri: Some(
                https://s:9000/b/p/ab?X-Amz-Signature=SECRET,
            ),
            inner: Http(
                HttpError {
                    kind: Connect,
                    source: reqwest::Error {
                        kind: Request,
                        source: hyper_util::client::legacy::Error(
                            Connect,
                            REASON
                        ),
                    },
                },
            ),
        },
    ),
}"""
"""What the library puts behind its message; ``REASON`` is the cause, which the message lacks."""


@pytest.mark.parametrize(
    ("reason", "told", "kind"),
    [
        (
            'ConnectError("tcp connect error", 127.0.0.1:1, Os { code: 111, message: "Connection refused" })',
            "no answer from https://s:9000: tcp connect error: Connection refused",
            "transient",
        ),
        (
            'ConnectError("dns error", Custom { kind: Uncategorized, error: "Name or service not known" })',
            "no answer from https://s:9000: dns error: Name or service not known",
            "transient",
        ),
        (
            "Custom { kind: Other, error: Custom { kind: Other, error: InvalidCertificate(\n  UnknownIssuer ) } }",
            "no answer from https://s:9000: InvalidCertificate(UnknownIssuer) "
            "(have this machine trust the authority of the certificate, or name it by SSL_CERT_FILE)",
            "permanent",
        ),
        (
            "Custom { kind: Other, error: Custom { kind: InvalidData, error: InvalidMessage( InvalidContentType ) } }",
            "no answer from https://s:9000: InvalidMessage(InvalidContentType) (the store does not speak TLS there)",
            "permanent",
        ),
        (
            "hyper::Error( Parse( Version, ), )",
            "no answer from https://s:9000: Parse(Version) (the store does not speak HTTP there)",
            "permanent",
        ),
        ("Unheard of", "no answer from https://s:9000: error sending request", "transient"),
    ],
)
def test_a_store_that_cannot_be_reached_is_told_with_the_reason(reason: str, told: str, kind: str) -> None:
    """Refused, an unknown name and a certificate that is not trusted are different errands for an operator."""
    where = "https://s:9000/b/p/ab?X-Amz-Signature=SECRET"
    text = f"Generic S3 error: Error performing GET {where} in 1ms - HTTP error: error sending request"
    error = GenericError(text + DEBUG.replace("REASON", reason))

    fault = fault_of(error)

    assert (fault.text, fault.kind) == (told, kind)
    assert "SECRET" not in str(error)


def test_a_missing_bucket_is_not_a_missing_object() -> None:
    """The first is a fault of the settings, the second an answer."""
    assert is_missing(FileNotFoundError("<Code>NoSuchKey</Code>"))
    assert not is_missing(FileNotFoundError("<Code>NoSuchBucket</Code>"))


def test_stores_without_conditional_writes_are_known_by_their_refusal() -> None:
    """The library's own refusal and the server's 501 both say so; an outage does not."""
    assert lacks_conditional_writes(NotImplementedError("conditional put is disabled"))
    assert lacks_conditional_writes(GenericError("status code: 501 Not Implemented"))
    assert not lacks_conditional_writes(GenericError("status code: 503 Service Unavailable"))
