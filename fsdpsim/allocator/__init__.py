"""Exact model of PyTorch's native CUDA caching allocator; knows nothing of FSDP or SimPy."""

from __future__ import annotations

from fsdpsim.allocator.blocks import Block, Segment
from fsdpsim.allocator.driver import (
    CudaFree,
    CudaMalloc,
    Device,
    DeviceMemory,
    DriverCall,
    IdleDevice,
    Map,
    SynchronizeEvents,
    Unmap,
)
from fsdpsim.allocator.errors import (
    OutOfMemory,
    OutOfMemoryError,
    RequestTooLargeError,
    UnsupportedSettingsError,
)
from fsdpsim.allocator.native import CachingAllocator
from fsdpsim.allocator.settings import AllocatorSettings

__all__ = [
    "AllocatorSettings",
    "Block",
    "CachingAllocator",
    "CudaFree",
    "CudaMalloc",
    "Device",
    "DeviceMemory",
    "DriverCall",
    "IdleDevice",
    "Map",
    "OutOfMemory",
    "OutOfMemoryError",
    "RequestTooLargeError",
    "Segment",
    "SynchronizeEvents",
    "Unmap",
    "UnsupportedSettingsError",
]
