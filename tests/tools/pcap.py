"""A pcap file of one TCP connection over IPv4, from who sent what: enough for Wireshark to reassemble the streams."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

LOCALHOST = b"\x7f\0\0\1"


def write(path: Path, segments: Iterable[tuple[str, bytes]], server_port: int = 7433) -> None:
    """Write `segments`, each ("client" or "server", its bytes) as one TCP segment, after a handshake."""
    ports = {"client": 40_000, "server": server_port}
    sequence = {"client": 1_000, "server": 9_000}
    packets: list[bytes] = []

    def add(side: str, flags: int, data: bytes = b"") -> None:
        other = "server" if side == "client" else "client"
        tcp = struct.pack(">HHIIBBHHH", ports[side], ports[other], sequence[side], sequence[other] if flags & 16 else 0,
                          5 << 4, flags, 65_535, 0, 0) + data  # fmt: skip
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), len(packets), 0, 64, 6, 0, LOCALHOST, LOCALHOST)
        packets.append(ip + tcp)
        sequence[side] += len(data) + (1 if flags & 3 else 0)  # SYN and FIN count as a byte

    add("client", 2)
    add("server", 18)
    add("client", 16)
    for side, data in segments:
        add(side, 24, data)
    add("client", 17)
    add("server", 17)
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65_535, 101))  # 101: raw IP
        for i, packet in enumerate(packets):
            file.write(struct.pack("<IIII", 1_790_000_000, i, len(packet), len(packet)) + packet)
