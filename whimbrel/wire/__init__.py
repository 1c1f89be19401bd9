"""Messages between processes: MessagePack through msgspec, versioned by `PROTOCOL`.

Work and reports travel over HTTP to the controller (`/work/v1`, `/agent/v1`); registrations and assignments are JSON
values in etcd. Unknown fields are ignored on reading, so that a newer peer may add some.
"""

from whimbrel.wire.codec import PROTOCOL, decode_json, decode_message, encode_json, encode_message

__all__ = ["PROTOCOL", "decode_json", "decode_message", "encode_json", "encode_message"]
