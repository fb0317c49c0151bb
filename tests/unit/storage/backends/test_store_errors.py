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


def test_a_missing_bucket_is_not_a_missing_object() -> None:
    """The first is a fault of the settings, the second an answer."""
    assert is_missing(FileNotFoundError("<Code>NoSuchKey</Code>"))
    assert not is_missing(FileNotFoundError("<Code>NoSuchBucket</Code>"))


def test_stores_without_conditional_writes_are_known_by_their_refusal() -> None:
    """The library's own refusal and the server's 501 both say so; an outage does not."""
    assert lacks_conditional_writes(NotImplementedError("conditional put is disabled"))
    assert lacks_conditional_writes(GenericError("status code: 501 Not Implemented"))
    assert not lacks_conditional_writes(GenericError("status code: 503 Service Unavailable"))
