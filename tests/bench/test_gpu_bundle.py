"""Bundle of a GPU machine: device code is erased from shared objects, and a damaged bundle is refused."""

import struct
import subprocess

import pytest
from gpu import bundle, run
from gpu.fatbin import CONTAINER, ELF, ENTRY, MAGIC, PTX, erase_other_code

KERNEL = """
namespace cute { template <int> struct C {}; template <class...> struct tuple {}; }
namespace cutlass { struct bfloat16_t {}; struct half_t {}; template <class T> void device_kernel(T*) {} }
template <class Shape, int V, class Element, class Sum, class Architecture> struct Mainloop {};
template void cutlass::device_kernel(
    Mainloop<cute::tuple<cute::C<128>, cute::C<176>, cute::C<%d>>, %d, cutlass::%s, float, int>*);
"""
"""A kernel with FlashAttention 3's name: head size of keys, of values, dtype."""


@pytest.fixture
def built(tmp_path):
    """Make a shared object of containers, each a list of ``(kind, architecture, image)``."""

    def build(*containers):
        section = b""
        for images in containers:
            entries = b"".join(
                ENTRY.pack(kind, 1, 64, len(image)) + struct.pack("<12xI32x", architecture) + image
                for kind, architecture, image in images
            )
            section += bytes(8) + CONTAINER.pack(MAGIC, 1, CONTAINER.size, len(entries)) + entries
        (tmp_path / "section").write_bytes(section)
        source, path = tmp_path / "section.s", tmp_path / "object.so"
        source.write_text(f'.section .nv_fatbin,"a"\n.balign 8\n.incbin "{tmp_path}/section"\n')
        subprocess.run(["gcc", "-shared", "-nostdlib", "-o", path, source], check=True)
        return path

    return build


def test_code_of_other_architectures_is_erased(built):
    words = [f"image {i} ".encode() * 8 for i in range(6)]
    first = [(ELF, 80, words[0]), (ELF, 90, words[1]), (PTX, 90, words[2])]
    path = built(first, [(PTX, 90, words[3])], [(ELF, 100, words[4]), (PTX, 100, words[5])])
    before = path.read_bytes()
    assert erase_other_code(path, 90) == (128, 256)
    after = path.read_bytes()
    assert [word in after for word in words] == [False, True, False, True, False, False]  # PTX where there is no ELF
    for word in (words[i] for i in (0, 2, 4, 5)):
        before = before.replace(word, bytes(64))
    assert after == before
    assert erase_other_code(path, 90) == (128, 256) and path.read_bytes() == before


def test_of_flash_attention_only_one_dtype_and_some_head_sizes_stay(built, tmp_path):
    def kernel(*names):
        (tmp_path / "kernel.cpp").write_text(KERNEL % names)
        subprocess.run(["g++", "-c", "kernel.cpp"], cwd=tmp_path, check=True)
        symbols = subprocess.run(["nm", tmp_path / "kernel.o"], capture_output=True, check=True).stdout.split()
        return next(symbol for symbol in symbols if symbol.startswith(b"_ZN7cutlass13device_kernel")) + b"\0"

    names = [(64, 64, "bfloat16_t"), (128, 128, "half_t"), (128, 128, "bfloat16_t"), (192, 128, "bfloat16_t")]
    kernels = [kernel(*name) for name in names]
    path = built(*([(ELF, 90, image)] for image in [*kernels, b"combine kernel"]))
    erase_other_code(path, 90, "bfloat16_t", (64, 128))
    after = path.read_bytes()
    assert [image in after for image in kernels] == [True, False, True, False] and b"combine kernel" in after


def test_an_object_without_device_code_is_refused(tmp_path):
    subprocess.run(["gcc", "-shared", "-nostdlib", "-x", "c", "-o", tmp_path / "a.so", "/dev/null"], check=True)
    with pytest.raises(ValueError, match="a.so has no device code"):
        erase_other_code(tmp_path / "a.so", 90)


def test_a_bundle_is_unpacked_once_and_a_damaged_one_is_refused(tmp_path):
    site, packed, work = tmp_path / "site", tmp_path / "bundle", tmp_path / "work"
    for folder in (site, packed, work):
        folder.mkdir()

    def pack(text):
        (site / "module.py").write_text(text)
        bundle.pack(site, packed / "site.tar.xz")

    pack("one")
    run.unpack(packed, work)
    assert (work / "site" / "module.py").read_text() == "one"
    (work / "site" / "module.py").write_text("changed")
    run.unpack(packed, work)
    assert (work / "site" / "module.py").read_text() == "changed", "the same bundle is not unpacked again"
    pack("two")
    run.unpack(packed, work)
    assert (work / "site" / "module.py").read_text() == "two", "another bundle replaces the files"
    content = (packed / "site.tar.xz").read_bytes()
    pack("three")
    (packed / "site.tar.xz").write_bytes(content)
    with pytest.raises(SystemExit, match=r"site.tar.xz is damaged: run `make gpu-bundle` again"):
        run.unpack(packed, work)
    assert (work / "site" / "module.py").read_text() == "two"


def test_a_bundle_that_is_too_large_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "site.tar.xz").write_bytes(bytes(1000))
    bundle.check_size(tmp_path)
    assert "site.tar.xz: 0.0 MB" in capsys.readouterr().out
    monkeypatch.setattr(bundle, "LIMIT", 1000)
    with pytest.raises(SystemExit, match="too large"):
        bundle.check_size(tmp_path)
