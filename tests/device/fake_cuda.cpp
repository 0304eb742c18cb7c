// A device type "cuda" for a machine without one. Its tensors lie in the host's memory and are computed by the CPU's
// kernels, so that every number is real. Where CUDA is strict, so is this: tensors of two devices do not meet, nothing
// may wait for the device while a graph is captured, memory that was never written is NaN, and a replay launches what
// was captured again, at the addresses of the capture. Launches, waits and bytes are counted for each of two devices.
//
// Not here: streams that overlap, races, random numbers, rounding and speed of the device's own kernels.
//
// A build of torch with CUDA has kernels, hooks and an allocator of its own for this device type: they are replaced.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace fake {
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto TYPE = c10::DeviceType::CUDA;
constexpr int DEVICES = 2;
thread_local int current = 0;  // the device of this thread: 0 in a new one, as with CUDA

std::mutex mutex;

// -- memory

std::array<std::atomic<int64_t>, DEVICES> allocated{};  // bytes
std::array<std::atomic<bool>, DEVICES> used{};  // anything done there: on a card that is a context of half a gigabyte

struct Header {
  int64_t size, device, unused[6];
};
static_assert(sizeof(Header) == 64);

void release(void* data) {
  if (data == nullptr) return;
  auto* header = static_cast<Header*>(data) - 1;
  allocated[header->device] -= header->size;
  std::free(header);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(TYPE, static_cast<c10::DeviceIndex>(current));
    used[current] = true;
    if (size == 0) return {nullptr, nullptr, &release, device};
    auto* header = static_cast<Header*>(std::aligned_alloc(64, (size + 2 * sizeof(Header) - 1) / 64 * 64));
    TORCH_CHECK_WITH(OutOfMemoryError, header != nullptr, "the host has no ", size, " bytes for the device");
    *header = {static_cast<int64_t>(size), current, {}};
    std::memset(header + 1, 0xff, size);  // a NaN in every floating type, -1 in every integer
    allocated[current] += static_cast<int64_t>(size);
    return {header + 1, header + 1, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
DeviceAllocator device_allocator;

std::map<void*, size_t> pinned;  // by address: bytes

void unpin(void* data) {
  std::lock_guard<std::mutex> guard(mutex);
  pinned.erase(data);
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* data = std::aligned_alloc(64, (size + 127) / 64 * 64);
    std::lock_guard<std::mutex> guard(mutex);
    pinned[data] = std::max<size_t>(size, 1);
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(mutex);
  auto after = pinned.upper_bound(const_cast<void*>(data));
  if (after == pinned.begin()) return false;
  auto [start, size] = *--after;
  return static_cast<const char*>(data) < static_cast<char*>(start) + size;
}

// -- devices

struct OnDevice {
  int before = current;
  explicit OnDevice(int device) { current = device; }
  ~OnDevice() { current = before; }
};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<TYPE> {
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, static_cast<c10::DeviceIndex>(current)}; }
  void setDevice(c10::Device device) const override { current = device.has_index() ? device.index() : current; }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
c10::impl::DeviceGuardImplRegistrar registrar(TYPE, new Guard());

// -- what is counted, and what a capture forbids

struct Launch {
  c10::OperatorHandle op;
  Stack given, found;
};

struct Capture {
  int device;
  bool broken = false;  // by a wait: nothing is valid any more
  std::vector<Launch> launches;
};

std::map<std::string, int64_t> launched, waited;
std::string sync_debug_mode = "default";
thread_local int inner = 0;  // above 0: what is done belongs to a launch that was counted
thread_local Capture* capture = nullptr;

struct Inner {
  Inner() { ++inner; }
  ~Inner() { --inner; }
};

void wait(const std::string& what, bool debugged = true) {
  if (inner) return;
  used[current] = true;
  if (capture != nullptr) {
    capture->broken = true;
    TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", what, ")");
  }
  if (debugged && sync_debug_mode != "default") {
    TORCH_CHECK(sync_debug_mode != "error", "called a synchronizing CUDA operation");
    TORCH_WARN("called a synchronizing CUDA operation");
  }
  std::lock_guard<std::mutex> guard(mutex);
  ++waited[what];
}

void count_launch(const std::string& name) {
  used[current] = true;
  std::lock_guard<std::mutex> guard(mutex);
  ++launched[name];
}

void keep(const c10::OperatorHandle& op, Stack given, Stack found) {
  if (!inner && capture != nullptr && capture->device == current)
    capture->launches.push_back({op, std::move(given), std::move(found)});
}

const std::set<std::string> READ_ON_THE_HOST{
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique", "aten::_unique2",
    "aten::unique_consecutive", "aten::bincount", "aten::equal", "aten::histc", "aten::is_set_to"};

template <class F>
void each_tensor(const IValue& value, const F& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& one : value.toListRef()) each_tensor(one, f);
  } else if (value.isTensorList()) {
    for (const Tensor& one : value.toTensorVector()) f(one);
  }
}

bool indexes(const std::string& name, size_t argument) {
  return argument == 1 && (name.starts_with("aten::index_put") || name.starts_with("aten::_index_put") ||
                           name == "aten::index" || name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put");
}

// The device of the tensors among the arguments; raises as CUDA does where there are two.
int device_of(const std::string& name, const Stack& given) {
  int device = -1;
  for (size_t i = 0; i < given.size(); ++i)
    each_tensor(given[i], [&](const Tensor& x) {
      if (!x.is_cuda()) return;
      TORCH_CHECK(device < 0 || device == x.get_device(), name, ": Expected all tensors to be on the same device, but found at "
                  "least two devices, cuda:", device, " and cuda:", int(x.get_device()), "!");
      device = x.get_device();
    });
  if (device < 0) return device;
  for (size_t i = 0; i < given.size(); ++i)
    each_tensor(given[i], [&](const Tensor& x) {
      if (indexes(name, i)) {
        if (x.is_cpu()) wait(name + " with indices on the CPU");
        if (x.scalar_type() == at::kBool || x.scalar_type() == at::kByte) wait(name + " with a mask");
        return;
      }
      TORCH_CHECK(x.is_cuda() || x.is_meta() || (x.is_cpu() && x.dim() == 0), name, ": Expected all tensors to be on the "
                  "same device, but found at least two devices, cuda:", device, " and cpu! (argument ", i, " ", x.sizes(), ")");
    });
  return device;
}

// -- launching

Tensor wide(const IValue& value) { return value.toTensor().to(at::kFloat); }

// Products of halves whose result is float32, which only CUDA has; the last argument may be the result's place.
Stack finish(const Tensor& found, const Stack& stack, size_t dtype) {
  bool given = stack.size() > dtype + 1 && stack.back().isTensor();
  Tensor out = found.to(stack[dtype].toScalarType());
  if (given) stack.back().toTensor().copy_(out);
  return {given ? stack.back().toTensor() : out};
}

const std::map<std::string, std::function<void(Stack&)>> OWN{
    {"aten::mm.dtype", [](Stack& s) { s = finish(at::mm(wide(s[0]), wide(s[1])), s, 2); }},
    {"aten::bmm.dtype", [](Stack& s) { s = finish(at::bmm(wide(s[0]), wide(s[1])), s, 2); }},
    {"aten::addmm.dtype", [](Stack& s) { s = finish(at::addmm(wide(s[0]), wide(s[1]), wide(s[2]), s[4].toScalar(), s[5].toScalar()), s, 3); }},
};

std::string full_name(const c10::OperatorHandle& op) {
  std::string overload = op.schema().overload_name();
  if (overload.ends_with("_out")) overload.resize(overload.size() - 4);
  return op.schema().name() + (overload.empty() ? "" : "." + overload);
}

void launch(const c10::OperatorHandle& op, Stack& stack) {
  Inner now;
  auto own = OWN.find(full_name(op));
  if (own != OWN.end()) return own->second(stack);
  at::native::cpu_fallback(op, &stack, false, c10::DispatchKey::CPU);
  for (IValue& found : stack)  // torch 2.11 leaves it where the first argument lies, which may be a number on the CPU
    if (found.isTensor() && found.toTensor().defined() && found.toTensor().is_cpu())
      found = found.toTensor().to(c10::Device(TYPE, static_cast<c10::DeviceIndex>(current)));
}

void dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.schema().name();
  size_t many = op.schema().arguments().size();
  Stack given(stack->end() - many, stack->end());
  stack->resize(stack->size() - many);
  int device = device_of(name, given);
  OnDevice there(device < 0 ? current : device);
  if (!inner) {
    bool unknown_size = name == "aten::repeat_interleave" && given.back().isNone();
    if (READ_ON_THE_HOST.count(name) || unknown_size) wait(name);
    count_launch(full_name(op));
  }
  Stack found = given;
  launch(op, found);
  keep(op, given, found);
  stack->insert(stack->end(), found.begin(), found.end());
}

void replay(const Capture& captured) {
  OnDevice there(captured.device);
  for (const Launch& one : captured.launches) {
    count_launch("replay");
    Stack stack(one.given);
    launch(one.op, stack);
    Inner now;
    for (size_t i = 0; i < one.found.size(); ++i) {
      std::vector<Tensor> to, from;
      each_tensor(one.found[i], [&](const Tensor& x) { to.push_back(x); });
      each_tensor(stack[i], [&](const Tensor& x) { from.push_back(x); });
      for (size_t j = 0; j < to.size(); ++j)
        if (!to[j].is_same(from[j])) to[j].copy_(from[j]);
    }
  }
}

// -- operators that have to know where tensors lie

int place_of(std::optional<at::Device> device) { return device && device->has_index() ? device->index() : current; }

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice there(place_of(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice there(place_of(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor on_host(const Tensor& x) {  // the same memory, as a tensor of the CPU
  if (!x.is_cuda()) return x;
  auto* data = x.storage().unsafeGetStorageImpl()->mutable_data();
  auto numbers = static_cast<int64_t>(x.storage().nbytes() / x.element_size());
  auto all = at::from_blob(data, {numbers}, at::TensorOptions().dtype(x.dtype()).device(at::kCPU));
  return all.as_strided(x.sizes(), x.strides(), x.storage_offset());
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  OnDevice there(self.is_cuda() ? self.get_device() : from.get_device());
  if (!inner) {
    if (self.numel() && self.is_cuda() != from.is_cuda()) {
      const Tensor& here = self.is_cuda() ? from : self;
      if (!(non_blocking && is_pinned(here.storage().data()))) wait(self.is_cuda() ? "copy to the device" : "copy from the device");
    }
    if (self.numel()) count_launch("aten::copy_");  // of no numbers CUDA launches nothing
  }
  if (self.numel()) {
    at::AutoDispatchBelowADInplaceOrView below;
    on_host(self).copy_(on_host(from).expand(self.sizes()));
  }
  keep(op, {self, from, non_blocking}, {self});
  return self;
}

void copy_boxed(const c10::OperatorHandle&, Stack* stack) {
  bool non_blocking = torch::jit::pop(*stack).toBool();
  Tensor from = torch::jit::pop(*stack).toTensor(), self = torch::jit::pop(*stack).toTensor();
  copy_(self, from, non_blocking);
  torch::jit::push(*stack, self);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  const_cast<Tensor&>(to).copy_(self, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  Inner now;
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

void resize_storage(const Tensor& x, int64_t size) {
  OnDevice there(x.get_device());
  auto* storage = x.storage().unsafeGetStorageImpl();
  auto fresh = device_allocator.allocate(size);
  auto kept = std::min<size_t>(size, storage->nbytes());
  if (kept) std::memcpy(fresh.mutable_get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto expected = (self.storage_offset() + c10::multiply_integers(size)) * self.element_size();
  if (expected > self.storage().nbytes()) resize_storage(self, expected);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

void record_stream(Tensor&, c10::Stream) {}

// In place of every kernel that torch was built with. What is registered after this, below and in Python, is in place of it.
bool replace_kernels() {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // it says of the first that it is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static std::vector<c10::RegistrationHandleRAII> kept;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA))
    if (name.name.starts_with("aten::"))
      kept.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&dispatch>(),
                                             std::nullopt, nullptr, "fake_cuda.cpp"));
  return true;
}
const bool replaced = replace_kernels();

int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // sdp::SDPBackend::math
}

const bool math_alone = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&math_attention), true);

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy_boxed>());
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_fused_sdp_choice", TORCH_FN(math_attention));
  m.impl("record_stream", TORCH_FN(record_stream));
}
}  // namespace fake

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex device) const override { return fake::used.at(device); }
  bool isPinnedPtr(const void* data) const override { return fake::is_pinned(data); }
  DeviceIndex deviceCount() const override { return fake::DEVICES; }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(fake::current); }
  void setCurrentDevice(DeviceIndex device) const override { fake::current = device; }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(fake::current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  int getNumGPUs() const override { return fake::DEVICES; }
  Allocator* getPinnedMemoryAllocator() const override { return &fake::pinned_allocator; }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  void deviceSynchronize(DeviceIndex) const override { fake::wait("synchronize", false); }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}  // namespace at

PYBIND11_MODULE(fake_cuda_backend, m) {
  namespace py = pybind11;
  using namespace fake;
  c10::SetAllocator(TYPE, &device_allocator);
  m.attr("DEVICES") = DEVICES;
  py::class_<Capture>(m, "Capture", py::module_local())
      .def(py::init([] { return Capture{current}; }))
      .def_readonly("device", &Capture::device)
      .def_readonly("broken", &Capture::broken)
      .def("__len__", [](const Capture& x) { return x.launches.size(); })
      .def("replay", &replay);
  m.def("enter_launch", [] { ++inner; });
  m.def("leave_launch", [] { --inner; });
  m.def("begin", [](Capture& into) { capture = &into; });
  m.def("end", [] { capture = nullptr; });
  m.def("is_capturing", [] { return capture != nullptr; });
  m.def("current_device", [] { return current; });
  m.def("set_device", [](int device) { current = device; });
  m.def("touch", [](int device) { used.at(device) = true; });
  m.def("used", [] {
    std::vector<int> found;
    for (int i = 0; i < DEVICES; ++i)
      if (used[i]) found.push_back(i);
    return found;
  });
  m.def("launches", [] { std::lock_guard<std::mutex> guard(mutex); return launched; });
  m.def("waits", [] { std::lock_guard<std::mutex> guard(mutex); return waited; });
  m.def("wait", &wait, py::arg("what"), py::arg("debugged") = true);
  m.def("count_launch", &count_launch);
  m.def("sync_debug_mode", [] { return sync_debug_mode; });
  m.def("set_sync_debug_mode", [](const std::string& mode) { sync_debug_mode = mode; });
  m.def("allocated", [](int device) { return allocated.at(device).load(); });
  m.def("resize_storage", &resize_storage);
  m.def("on_host", &on_host);
}
