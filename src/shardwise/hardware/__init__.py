"""What runs the model: devices, each number with its source and date, and clusters of them in tiers."""

from shardwise.hardware._catalogue import Lookup, device_names, device_to_toml, find_device, load_device, other_names
from shardwise.hardware._clouds import COMMITMENTS, Offer, find_rented, offers
from shardwise.hardware._context import context_bytes, peer_bytes
from shardwise.hardware._device import Device, Fact, Tier, find_link
from shardwise.hardware._parse import (
    OVERRIDES,
    Cluster,
    build_cluster,
    counted_text,
    instance_devices,
    part_of,
    says_how_many,
)
