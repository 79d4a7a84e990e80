"""S3 and what speaks its protocol. botocore is imported when a store is opened; it is the extra `s3`.

pyarrow's own S3 file system cannot say "only if there is none", on which one driver per run rests; botocore can
(`If-None-Match: *`). All sending and trying again is bounded here; botocore's own retries are off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import uuid4

from rollout_engine.errors import InputError
from rollout_engine.store.objects import OPEN_PATIENCE_S, ObjectError, PassingError, Stamp, patiently

CONNECT_S = 5.0
READ_S = 20.0
"""The longest silence of a store within one try."""
CONNECTIONS = 16
PAGE = 1000
"""Keys that are listed in one answer."""
_DELETED_AT_ONCE = 1000
_PROBE = "epochs/exclusive"
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""409 is a conditional put that met another one under way."""
_REMEDIES = {
    "NoSuchBucket": "make the bucket, or name one that is there",
    "NoCredentialsError": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machine a role",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID, and AWS_ENDPOINT_URL where the store is not Amazon's",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL where the store is not Amazon's",
    "PermanentRedirect": "set AWS_DEFAULT_REGION to the bucket's region",
    "AuthorizationHeaderMalformed": "set AWS_DEFAULT_REGION to the bucket's region",
    "ExpiredToken": "renew the credentials, then `rollout resume`",
}
_DENIED = "let these credentials list, get, put and delete objects under the prefix"
_SOMETHING = "check the bucket, AWS_ENDPOINT_URL and the credentials"


class S3Objects:
    """The objects of one bucket under one prefix."""

    def __init__(self, bucket: str, prefix: str, patience_s: float = OPEN_PATIENCE_S) -> None:
        """Raises InputError where botocore is missing or cannot be set up. Nothing is sent."""
        self.uri = f"s3://{bucket}/{prefix}"
        self.patience_s = patience_s
        self._bucket, self._prefix = bucket, prefix
        self._client = _make_client(self.uri)

    def list(self, prefix: str = "") -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        asked: dict[str, Any] = {"Prefix": f"{self._prefix}/{prefix}", "MaxKeys": PAGE}
        while True:
            page = self._ask("list_objects_v2", prefix, asked)
            for one in page.get("Contents", ()):
                found[one["Key"][len(self._prefix) + 1 :]] = Stamp(one["Size"], one["ETag"])
            if not page.get("IsTruncated"):
                return found
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def get(self, key: str) -> bytes | None:
        def read(answer: Any) -> bytes:
            with answer["Body"] as body:
                data: bytes = body.read()
            return data

        try:
            data: bytes = self._ask("get_object", key, self._at(key), read)
        except FileNotFoundError:
            return None
        return data

    def put(self, key: str, data: bytes) -> Stamp:
        answer = self._ask("put_object", key, {"Body": data, **self._at(key)})
        return Stamp(len(data), answer["ETag"])

    def create(self, key: str, data: bytes) -> None:
        try:
            self._ask("put_object", key, {"Body": data, "IfNoneMatch": "*", **self._at(key)})
        except FileExistsError:
            # A try that was answered by an error may have been carried out. What we made, byte for byte, is ours.
            if self.get(key) != data:
                raise

    def exists(self, key: str) -> bool:
        try:
            self._ask("head_object", key, self._at(key))
        except FileNotFoundError:
            return False
        return True

    def age_s(self, key: str) -> float:
        answer = self._ask("head_object", key, self._at(key))
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        age: float = (now - answer["LastModified"]).total_seconds()
        return max(age, 0.0)

    def delete(self, keys: Iterable[str]) -> None:
        names = [{"Key": f"{self._prefix}/{key}"} for key in keys]
        for start in range(0, len(names), _DELETED_AT_ONCE):
            chosen = {"Objects": names[start : start + _DELETED_AT_ONCE], "Quiet": True}
            answer = self._ask("delete_objects", "", {"Delete": chosen})
            if errors := answer.get("Errors"):
                code = str(errors[0].get("Code"))
                raise ObjectError(f"{self.uri}: objects cannot be removed: {code}; {_remedy(code, 403)}")

    def check_drivable(self) -> None:
        return None

    def check_exclusive(self) -> None:
        try:
            self.create(_PROBE, uuid4().hex.encode())
            self.create(_PROBE, uuid4().hex.encode())
        except FileExistsError:
            return
        except ObjectError as error:
            raise InputError(str(error)) from error
        raise InputError(
            "the store does not honour If-None-Match, so two drivers could work on one run without noticing",
            where=self.uri,
            fix="use a store that does (Amazon S3, MinIO, Ceph, R2 in their newer versions), or a mounted file system",
        )

    def _at(self, key: str) -> dict[str, str]:
        return {"Key": f"{self._prefix}/{key}"}

    def _ask(
        self, operation: str, key: str, arguments: dict[str, Any], then: Callable[[Any], Any] | None = None
    ) -> Any:
        """Raises FileNotFoundError, FileExistsError, ObjectError."""
        what = f"{self.uri}/{key}".rstrip("/")

        def once() -> Any:
            with _translated(what):
                answer = getattr(self._client, operation)(Bucket=self._bucket, **arguments)
                return answer if then is None else then(answer)

        return patiently(once, what, self.patience_s)


class _translated:
    """botocore's errors as ours. Their own texts are left out: they may repeat what was sent."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            FlexibleChecksumError,
            HTTPClientError,
            IncompleteReadError,
        )

        if isinstance(error, ClientError):
            raise _of_answer(self._what, error.response) from error
        if isinstance(error, HTTPClientError | IncompleteReadError | FlexibleChecksumError):
            raise PassingError(f"the store does not answer ({type(error).__name__})") from error
        if isinstance(error, BotoCoreError):
            name = type(error).__name__
            raise ObjectError(f"{self._what}: {name}; {_remedy(name, 0)}") from error


def _of_answer(what: str, answer: Any) -> Exception:
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if status == 412:
        return FileExistsError(f"{what}: is there already")
    if code in ("NoSuchKey", "404"):
        return FileNotFoundError(f"{what}: there is no such object")
    if status in _PASSING:
        return PassingError(f"the store answers HTTP {status} {code}")
    said = "" if code in ("", str(status)) else f" {code}"
    return ObjectError(f"{what}: the store answers HTTP {status}{said}; {_remedy(code, status)}")


def _remedy(code: str, status: int) -> str:
    return _REMEDIES.get(code) or (_DENIED if status in (401, 403) else _SOMETHING)


_making = threading.Lock()


def _make_client(uri: str) -> Any:
    """Raises InputError."""
    try:
        import botocore.config
        import botocore.exceptions
        import botocore.session
    except ImportError as error:
        raise InputError("the S3 client is not installed", where=uri, fix="pip install 'rollout-engine[s3]'") from error
    own = bool(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
    config = botocore.config.Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        max_pool_connections=CONNECTIONS,
        retries={"total_max_attempts": 1},
        # Buckets are host names at Amazon; most other stores have one name for all of them.
        s3={"addressing_style": "path" if own else "auto"},
    )
    try:
        with _making:  # a session's loading of its models is not safe from several threads
            session = botocore.session.get_session()
            region = session.get_config_variable("region") or os.environ.get("AWS_REGION") or "us-east-1"
            return session.create_client("s3", region_name=region, config=config)
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise InputError(
            f"the S3 client cannot be set up ({type(error).__name__})",
            where=uri,
            fix="check AWS_ENDPOINT_URL (http://HOST:PORT), AWS_PROFILE and ~/.aws/config",
        ) from error
