"""What is called of the CUDA driver, on a library that stands in for it and checks what it is given."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from monarch_async._channel.cuda_driver import Driver
from monarch_async._channel.devices import DeviceError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

STAND_IN = r"""
#include <string.h>
typedef unsigned long long P;
typedef struct { char data[64]; } Handle;
static int mode = 0, depth = 0;
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 100; return ordinal > 1 ? 101 : 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = 141ULL << 30; return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(0x7f0000000000ULL + device); return 0; }
int cuCtxPushCurrent_v2(void *context) { depth++; return ((P)context >> 40) == 0x7f ? 0 : 201; }
int cuCtxPopCurrent_v2(void **context) { depth--; *context = 0; return 0; }
int cuThreadExchangeStreamCaptureMode(int *given) { int before = mode; mode = *given; *given = before; return 0; }
static int inside(void) { return mode == 2 && depth == 1; }
int cuMemAlloc_v2(P *address, size_t size) {
    if (!inside()) return 999;
    if (size > 1ULL << 40) return 2;
    *address = 0x7ffff0000000ULL + size;
    return 0;
}
int cuMemFree_v2(P address) { return inside() && address == 0x7ffff0100000ULL ? 0 : 1; }
int cuMemcpyAsync(P target, P source, size_t size, void *stream) {
    return inside() && target == 0x7ffff0100000ULL && source == 0x7ffff0200001ULL && size == 1ULL << 33
        && (!stream || (P)stream == 0x7f0011223344ULL) ? 0 : 1;
}
int cuIpcGetMemHandle(Handle *handle, P address) { memset(handle, 9, 64); memcpy(handle, &address, 8); return inside() ? 0 : 999; }
int cuIpcOpenMemHandle_v2(P *address, Handle handle, unsigned flags) {
    if (!inside() || flags != 1 || handle.data[63] != 9) return 1;
    memcpy(address, &handle, 8);
    *address += 5;
    return 0;
}
int cuIpcCloseMemHandle(P address) { return inside() && address == 0x7ffff0100005ULL ? 0 : 1; }
int cuEventQuery(void *event) { return !inside() ? 999 : (P)event == 0x7f0000000001ULL ? 600 : (P)event == 5 ? 700 : 0; }
int cuGetErrorName(int code, const char **text) { *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : 0; return code != 2; }
int cuGetErrorString(int code, const char **text) { *text = "text"; return 0; }
int state(void) { return mode * 10 + depth; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder: Path = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(STAND_IN)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "driver.so", folder / "driver.c"], check=True, capture_output=True)
    return Driver(str(folder / "driver.so"))


def test_arguments_arrive_as_the_driver_wants_them(driver: Driver) -> None:
    """Addresses, sizes and streams in 64 bits, handles by value, each inside the device's context and in the relaxed capture mode."""
    assert (bytes([100]) * 16, 141 << 30) == (driver.uuid(0), driver.memory_of(1))
    address = driver.allocate(0, 1 << 20)
    assert 0x7FFFF0100000 == address
    handle = driver.export(0, address)
    assert address.to_bytes(8, "little") + bytes([9]) * 56 == handle
    opened = driver.open(0, handle)
    assert address + 5 == opened
    for stream in (0, 0x7F0011223344):
        driver.copy(0, address, address + (1 << 20) + 1, 1 << 33, stream)
    assert not driver.finished(0, 0x7F0000000001)
    assert driver.finished(0, 0x7F0000000002)
    driver.close(0, opened)
    driver.free(0, address)


def test_errors_say_what_the_driver_says(driver: Driver) -> None:
    """By name and text; afterwards context and capture mode are what they were."""
    with pytest.raises(DeviceError, match=r"cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY \(text\)"):
        driver.allocate(0, 1 << 41)
    with pytest.raises(DeviceError, match=r"cuEventQuery: error 700 \(text\)"):
        driver.finished(0, 5)
    with pytest.raises(DeviceError, match=r"cuDeviceGet: error 101"):
        driver.uuid(7)
    with pytest.raises(DeviceError, match="has 64 bytes, not 3"):
        driver.open(0, b"abc")
    assert 0 == driver.library.state()


def test_without_a_driver() -> None:
    """And with a library that is none."""
    with pytest.raises(DeviceError, match="the CUDA driver can't be called"):
        Driver("no such library")
    with pytest.raises(DeviceError, match="the CUDA driver can't be called"):
        Driver("libc.so.6")
