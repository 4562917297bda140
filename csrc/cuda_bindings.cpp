#include "cuda_bindings.h"

#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "driver/copy_program.h"
#include "driver/digest_program.h"
#include "driver/mapping.h"
#include "driver/merge_program.h"
#include "driver/stream.h"

namespace py = pybind11;

namespace lora_refit {
namespace {

using driver::Device;
using driver::DeviceAddress;
using driver::StreamHandle;
using Unlocked = py::call_guard<py::gil_scoped_release>;

StreamHandle stream_of(uint64_t stream) { return reinterpret_cast<StreamHandle>(stream); }

// An object that Python may close before it is collected.
template <typename T>
class Closable {
 public:
  explicit Closable(T value) : value_(std::move(value)) {}

  T& open() {
    if (!value_) throw std::invalid_argument("this object was closed");
    return *value_;
  }
  void close() { value_.reset(); }

 private:
  std::optional<T> value_;
};

template <typename T>
py::class_<Closable<T>> bind_closable(py::module_& module, const char* name) {
  return py::class_<Closable<T>>(module, name).def("close", &Closable<T>::close, Unlocked());
}

template <typename T>
DeviceAddress address_of(Closable<T>& memory) {
  return memory.open().address();
}

template <typename T>
size_t bytes_of(Closable<T>& memory) {
  return memory.open().bytes();
}

std::optional<int> ordinal_of(const std::string& uuid) {
  for (const Device* device : Device::all()) {
    if (device->uuid() == uuid) return device->ordinal();
  }
  return std::nullopt;
}

void bind_devices(py::module_& module) {
  py::class_<Device, std::unique_ptr<Device, py::nodelete>>(module, "Device")
      .def_property_readonly("ordinal", &Device::ordinal)
      .def_property_readonly("uuid", &Device::uuid)
      .def_property_readonly("name", &Device::name)
      .def_property_readonly(
          "compute_capability",
          [](const Device& device) { return std::make_pair(device.major(), device.minor()); })
      .def_property_readonly("multiprocessors", &Device::multiprocessors)
      .def_property_readonly("memory_bytes", &Device::memory_bytes);
  module.def("status", &driver::why_unavailable, Unlocked());
  module.def(
      "set_image", [](const std::string& image) { driver::set_image(image); }, py::arg("fatbin"));
  module.def("devices", &Device::all, py::return_value_policy::reference);
  module.def("ordinal_of", &ordinal_of, py::arg("uuid"));
  module.def(
      "can_access_peer",
      [](int device, int other) {
        return driver::can_access_peer(Device::at(device), Device::at(other));
      },
      py::arg("device"), py::arg("other"));
  module.def(
      "enable_peer_access",
      [](int device, int other) {
        driver::enable_peer_access(Device::at(device), Device::at(other));
      },
      py::arg("device"), py::arg("other"), Unlocked());
}

std::unique_ptr<driver::CopyProgram> make_copy_program(int device, const py::buffer& blocks,
                                                       const std::vector<int>& src_dtypes,
                                                       const std::vector<int64_t>& src_sizes,
                                                       const std::vector<int>& dst_dtypes,
                                                       const std::vector<int64_t>& dst_sizes) {
  return std::make_unique<driver::CopyProgram>(
      Device::at(device), unpack<CopyBlock>("blocks", blocks),
      buffer_shapes("sources", src_dtypes, src_sizes),
      buffer_shapes("destinations", dst_dtypes, dst_sizes));
}

template <typename Program>
driver::Addresses addresses_of(const Program& program, const Words& src, const Words& dst) {
  check_length("src_addresses", src, program.source_count());
  check_length("dst_addresses", dst, program.destination_count());
  return {src.data(), dst.data()};
}

template <typename Program>
uint64_t* digests_of(const Program& program, Words& digests) {
  check_length("digests", digests, program.destination_count());
  return digests.mutable_data();
}

void run_copy(driver::CopyProgram& program, const Words& src, const Words& dst, Words& digests,
              uint64_t stream) {
  const driver::Addresses addresses = addresses_of(program, src, dst);
  uint64_t* out = digests_of(program, digests);
  py::gil_scoped_release unlocked;
  program.run(addresses, out, stream_of(stream));
}

void launch_copy(driver::CopyProgram& program, const Words& src, const Words& dst,
                 uint64_t stream) {
  const driver::Addresses addresses = addresses_of(program, src, dst);
  py::gil_scoped_release unlocked;
  program.launch(addresses, stream_of(stream));
}

void collect_copy(driver::CopyProgram& program, Words& digests) {
  uint64_t* out = digests_of(program, digests);
  py::gil_scoped_release unlocked;
  program.collect(out);
}

std::unique_ptr<driver::MergeProgram> make_merge_program(
    int device, const py::buffer& blocks, const py::buffer& segments,
    const std::vector<int>& src_dtypes, const std::vector<int64_t>& src_sizes,
    const std::vector<int>& dst_dtypes, const std::vector<int64_t>& dst_sizes, int32_t modules) {
  return std::make_unique<driver::MergeProgram>(
      Device::at(device), unpack<MergeBlock>("blocks", blocks),
      unpack<MergeSegment>("segments", segments), buffer_shapes("sources", src_dtypes, src_sizes),
      buffer_shapes("destinations", dst_dtypes, dst_sizes), modules);
}

void run_merge(driver::MergeProgram& program, const Words& src, const Words& dst, Words& digests,
               const py::buffer& sums, uint64_t stream) {
  const driver::Addresses addresses = addresses_of(program, src, dst);
  uint64_t* out = digests_of(program, digests);
  MergeSums* totals = writable_sums(sums, program.module_count());
  py::gil_scoped_release unlocked;
  program.run(addresses, out, totals, stream_of(stream));
}

void digest_on_device(int device, const Words& addresses, const Words& sizes_bytes, Words& out,
                      uint64_t stream) {
  const size_t count = static_cast<size_t>(out.size());
  check_length("out", out, count);
  const std::vector<uint64_t> starts = copy_words("addresses", addresses, count);
  const std::vector<uint64_t> sizes = copy_words("sizes_bytes", sizes_bytes, count);
  uint64_t* digests = out.mutable_data();
  py::gil_scoped_release unlocked;
  driver::digest_buffers(Device::at(device), starts, sizes, digests, stream_of(stream));
}

void bind_programs(py::module_& module) {
  using Program = driver::CopyProgram;
  py::class_<Program>(module, "CopyProgram")
      .def(py::init(&make_copy_program), py::arg("device"), py::arg("blocks"),
           py::arg("src_dtypes"), py::arg("src_sizes"), py::arg("dst_dtypes"), py::arg("dst_sizes"))
      .def("run", &run_copy, py::arg("src_addresses").noconvert(),
           py::arg("dst_addresses").noconvert(), py::arg("digests").noconvert(), py::arg("stream"))
      .def("launch", &launch_copy, py::arg("src_addresses").noconvert(),
           py::arg("dst_addresses").noconvert(), py::arg("stream"))
      .def("collect", &collect_copy, py::arg("digests").noconvert())
      .def_property_readonly("block_count", &Program::block_count)
      .def_property_readonly("tile_count", &Program::tile_count)
      .def_property_readonly("bytes_read", &Program::bytes_read)
      .def_property_readonly("bytes_written", &Program::bytes_written);
  using Merge = driver::MergeProgram;
  py::class_<Merge>(module, "MergeProgram")
      .def(py::init(&make_merge_program), py::arg("device"), py::arg("blocks"), py::arg("segments"),
           py::arg("src_dtypes"), py::arg("src_sizes"), py::arg("dst_dtypes"), py::arg("dst_sizes"),
           py::arg("modules"))
      .def("run", &run_merge, py::arg("src_addresses").noconvert(),
           py::arg("dst_addresses").noconvert(), py::arg("digests").noconvert(), py::arg("sums"),
           py::arg("stream"))
      .def_property_readonly("block_count", &Merge::block_count)
      .def_property_readonly("strip_count", &Merge::strip_count)
      .def_property_readonly("bytes_read", &Merge::bytes_read)
      .def_property_readonly("bytes_written", &Merge::bytes_written);
  module.def("digest", &digest_on_device, py::arg("device"), py::arg("addresses").noconvert(),
             py::arg("sizes_bytes").noconvert(), py::arg("out").noconvert(), py::arg("stream"));
}

template <typename T>
Closable<T> make_on(int device) {
  return Closable<T>(T(Device::at(device)));
}

Closable<driver::DeviceMemory> make_device_memory(int device, size_t bytes) {
  return Closable(driver::DeviceMemory::shareable(Device::at(device), bytes));
}

Closable<driver::SharedDeviceMemory> make_shared_memory(int device, size_t bytes) {
  return Closable(driver::SharedDeviceMemory(Device::at(device), bytes));
}

py::bytes ipc_handle(Closable<driver::DeviceMemory>& memory) {
  const driver::IpcHandle handle = memory.open().ipc_handle();
  return py::bytes(reinterpret_cast<const char*>(handle.bytes), sizeof handle.bytes);
}

Closable<driver::Mapping> open_ipc(int device, const std::string& bytes) {
  driver::IpcHandle handle;
  if (bytes.size() != sizeof handle.bytes) {
    throw std::invalid_argument("an IPC handle has " + std::to_string(sizeof handle.bytes) +
                                " bytes, not " + std::to_string(bytes.size()));
  }
  std::memcpy(handle.bytes, bytes.data(), sizeof handle.bytes);
  return Closable(driver::Mapping::open_ipc(Device::at(device), handle));
}

Closable<driver::Mapping> open_fd(int device, int fd, size_t bytes) {
  return Closable(driver::Mapping::open_fd(Device::at(device), fd, bytes));
}

Closable<driver::Mapping> register_host(int device, uint64_t address, size_t bytes) {
  void* host = reinterpret_cast<void*>(address);
  return Closable(driver::Mapping::register_host(Device::at(device), host, bytes));
}

py::bytes copy_to_host(int device, DeviceAddress address, size_t bytes) {
  std::string copied(bytes, '\0');
  {
    py::gil_scoped_release unlocked;
    driver::copy_to_host(Device::at(device), copied.data(), address, bytes);
  }
  return py::bytes(copied);
}

void copy_from_host(int device, DeviceAddress address, const py::buffer& data) {
  const std::vector<char> bytes = unpack<char>("data", data);
  py::gil_scoped_release unlocked;
  driver::copy_from_host(Device::at(device), address, bytes.data(), bytes.size());
}

void bind_memory(py::module_& module) {
  bind_closable<driver::DeviceMemory>(module, "DeviceMemory")
      .def(py::init(&make_device_memory), py::arg("device"), py::arg("bytes"))
      .def_property_readonly("address", &address_of<driver::DeviceMemory>)
      .def_property_readonly("bytes", &bytes_of<driver::DeviceMemory>)
      .def("ipc_handle", &ipc_handle);
  bind_closable<driver::SharedDeviceMemory>(module, "SharedDeviceMemory")
      .def(py::init(&make_shared_memory), py::arg("device"), py::arg("bytes"))
      .def_property_readonly("address", &address_of<driver::SharedDeviceMemory>)
      .def_property_readonly("bytes", &bytes_of<driver::SharedDeviceMemory>)
      .def("export_fd",
           [](Closable<driver::SharedDeviceMemory>& memory) { return memory.open().export_fd(); });
  bind_closable<driver::Mapping>(module, "Mapping")
      .def_property_readonly("address", &address_of<driver::Mapping>);
  module.def("open_ipc", &open_ipc, py::arg("device"), py::arg("handle"));
  module.def("open_fd", &open_fd, py::arg("device"), py::arg("fd"), py::arg("bytes"));
  module.def("register_host", &register_host, py::arg("device"), py::arg("address"),
             py::arg("bytes"), Unlocked());
  module.def("copy_to_host", &copy_to_host, py::arg("device"), py::arg("address"),
             py::arg("bytes"));
  module.def("copy_from_host", &copy_from_host, py::arg("device"), py::arg("address"),
             py::arg("data"));
  module.def(
      "memset",
      [](int device, DeviceAddress address, size_t bytes, uint64_t stream) {
        driver::zero_async(Device::at(device), address, bytes, stream_of(stream));
      },
      py::arg("device"), py::arg("address"), py::arg("bytes"), py::arg("stream"), Unlocked());
}

void bind_streams(py::module_& module) {
  bind_closable<driver::Stream>(module, "Stream")
      .def(py::init(&make_on<driver::Stream>), py::arg("device"))
      .def_property_readonly("handle", [](Closable<driver::Stream>& stream) {
        return reinterpret_cast<uint64_t>(stream.open().handle());
      });
  bind_closable<driver::Event>(module, "Event")
      .def(py::init(&make_on<driver::Event>), py::arg("device"))
      .def(
          "record",
          [](Closable<driver::Event>& event, uint64_t stream) {
            event.open().record(stream_of(stream));
          },
          py::arg("stream"))
      .def(
          "synchronize", [](Closable<driver::Event>& event) { event.open().synchronize(); },
          Unlocked())
      .def_property_readonly("done",
                             [](Closable<driver::Event>& event) { return event.open().done(); });
  bind_closable<driver::Graph>(module, "Graph")
      .def(
          "launch",
          [](Closable<driver::Graph>& graph, uint64_t stream) {
            graph.open().launch(stream_of(stream));
          },
          py::arg("stream"), Unlocked());
  module.def(
      "synchronize",
      [](int device, uint64_t stream) {
        driver::synchronize(Device::at(device), stream_of(stream));
      },
      py::arg("device"), py::arg("stream"), Unlocked());
  module.def(
      "is_capturing",
      [](int device, uint64_t stream) {
        return driver::is_capturing(Device::at(device), stream_of(stream));
      },
      py::arg("device"), py::arg("stream"));
  module.def(
      "begin_capture",
      [](int device, uint64_t stream) {
        driver::Graph::begin_capture(Device::at(device), stream_of(stream));
      },
      py::arg("device"), py::arg("stream"));
  module.def(
      "end_capture",
      [](int device, uint64_t stream) {
        return Closable(driver::Graph::end_capture(Device::at(device), stream_of(stream)));
      },
      py::arg("device"), py::arg("stream"));
}

}  // namespace

void bind_cuda(py::module_& module) {
  py::module_ cuda = module.def_submodule("cuda", "The CUDA backend. Typed in _C/cuda.pyi.");
  py::register_exception<driver::Error>(cuda, "CudaError", PyExc_RuntimeError);
  bind_devices(cuda);
  bind_programs(cuda);
  bind_memory(cuda);
  bind_streams(cuda);
}

}  // namespace lora_refit
