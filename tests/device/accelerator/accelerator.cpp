// A simulated accelerator ("sim", on PrivateUse1). Operators run at once, on the CPU, so values are the CPU's; what
// differs is what a GPU would punish. Device memory is closed to the host (mprotect) outside of kernels, and holds NaN
// until it is written. Streams and events are vector clocks (happens-before): a use on one stream of what another
// stream has not finished is a race, also where the values happen to be right. Copies to the host that are waited for,
// and kernels whose result the host reads, are listed as synchronisations. Autograd has threads of its own.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>

using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId, at::Tensor;
constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex COUNT = 2;
using Id = int64_t;  // of a stream, over all devices
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- clocks: of each stream, of each event, and of the host (what it has waited for) ----

struct Clock {
  std::map<Id, int64_t> at;
  void join(const Clock& other) { for (auto& [stream, time] : other.at) at[stream] = std::max(at[stream], time); }
  bool has(Id stream, int64_t time) const { auto i = at.find(stream); return i != at.end() && i->second >= time; }
};
struct Use { int64_t time = 0; std::string by; };
struct Block {  // of device memory
  Id owner; size_t size; int users = 0;
  Id writer = -1; Use written;
  std::map<Id, Use> reads;
  std::set<Id> recorded;  // by record_stream
};
struct PinnedBlock { size_t size; std::map<Id, int64_t> reads; };  // of asynchronous copies

static std::recursive_mutex mutex;
static std::map<Id, Clock> clocks;
static std::map<int64_t, Clock> events;
static Clock host;
static std::map<void*, Block> blocks;
static std::map<void*, PinnedBlock> pinned;
static std::vector<std::string> findings, syncs;
static py::object* on_sync = nullptr;
static std::atomic<int64_t> next_stream{1}, next_event{1};
thread_local DeviceIndex device_now = 0;
thread_local StreamId stream_now[COUNT] = {0, 0};

static Id id_of(DeviceIndex device, StreamId stream) { return device * 1000000 + stream; }
static Id here(DeviceIndex device) { return id_of(device, stream_now[device]); }
static int64_t launch(Id stream) { auto& clock = clocks[stream]; clock.join(host); return ++clock.at[stream]; }
static void order(Id first, Id then) { Lock lock(mutex); clocks[then].join(clocks[first]); }

static void touch(void* base, Id stream, int64_t time, bool writes, const std::string& by) {
  auto i = blocks.find(base);
  if (i == blocks.end()) return;
  Block& b = i->second;
  auto race = [&](const std::string& what, const Use& before, Id other) {
    findings.push_back("RACE " + what + " by " + before.by + " on stream " + std::to_string(other) + ", and stream " +
                       std::to_string(stream) + " does not wait for it: " + by);
  };
  auto& clock = clocks[stream];
  if (b.writer >= 0 && !clock.has(b.writer, b.written.time)) race(writes ? "write after write" : "read after write", b.written, b.writer);
  if (!writes) { b.reads[stream] = {time, by}; return; }
  for (auto& [reader, use] : b.reads) if (!clock.has(reader, use.time)) race("write after read", use, reader);
  b.writer = stream; b.written = {time, by}; b.reads.clear();
}
static void tell(const std::string& why) {  // a synchronisation; no lock is held, for another thread may want it and hold the GIL
  { Lock lock(mutex); syncs.push_back(why); }
  if (!on_sync) return;
  py::gil_scoped_acquire gil;  // it changes under the GIL: another thread may have ended it before this one got that
  if (on_sync) (*on_sync)(why);
}
static void sync_host(Id stream, const std::string& why) {
  { Lock lock(mutex); host.join(clocks[stream]); }
  tell(why);
}

// ---- memory ----

static size_t paged(size_t n) { return (n + 4095) / 4096 * 4096; }
static void release(void* p) {
  Lock lock(mutex);
  auto i = blocks.find(p);
  if (i == blocks.end()) return;
  Block& b = i->second;
  auto check = [&](Id stream, const Use& use) {
    if (stream >= 0 && stream != b.owner && !b.recorded.count(stream) && !clocks[b.owner].has(stream, use.time) && !host.has(stream, use.time))
      findings.push_back("FREED memory of stream " + std::to_string(b.owner) + " while stream " + std::to_string(stream) + " may still be in " + use.by);
  };
  check(b.writer, b.written);
  for (auto& [stream, use] : b.reads) check(stream, use);
  munmap(p, paged(b.size));
  blocks.erase(i);
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Lock lock(mutex);
    Device device(SIM, device_now);
    if (!n) return {nullptr, nullptr, &release, device};
    void* p = mmap(nullptr, paged(n), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "sim: out of memory");
    memset(p, 0xFF, n);  // NaN in every float
    mprotect(p, paged(n), PROT_NONE);
    blocks[p] = Block{here(device_now), n};
    return {p, p, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static DeviceAllocator allocator;
REGISTER_ALLOCATOR(SIM, &allocator);

static void unpin(void* p) { Lock lock(mutex); pinned.erase(p); free(p); }
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Lock lock(mutex);
    void* p = malloc(std::max<size_t>(n, 1));
    pinned[p] = PinnedBlock{std::max<size_t>(n, 1)};
    return {p, p, &unpin, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static PinnedAllocator pinned_allocator;
static PinnedBlock* pinned_at(const void* p) {
  Lock lock(mutex);
  auto i = pinned.upper_bound(const_cast<void*>(p));
  if (i == pinned.begin()) return nullptr;
  --i;
  return static_cast<const char*>(p) < static_cast<char*>(i->first) + i->second.size ? &i->second : nullptr;
}

static void* base_of(const Tensor& t) { return const_cast<void*>(t.storage().data_ptr().get()); }
struct Open {  // device memory that a kernel may touch, for as long as it runs
  std::vector<void*> bases;
  void add(void* p) {
    Lock lock(mutex);
    auto i = blocks.find(p);
    if (i == blocks.end()) return;
    if (i->second.users++ == 0) mprotect(p, paged(i->second.size), PROT_READ | PROT_WRITE);
    bases.push_back(p);
  }
  ~Open() {
    Lock lock(mutex);
    for (void* p : bases) {
      auto i = blocks.find(p);
      if (i != blocks.end() && --i->second.users == 0) mprotect(p, paged(i->second.size), PROT_NONE);
    }
  }
};

// ---- the device, as torch asks for it ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device d) const override { Device old(SIM, device_now); device_now = d.index(); return old; }
  Device getDevice() const override { return Device(SIM, device_now); }
  void setDevice(Device d) const override { device_now = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { device_now = d.index(); }
  static Device numbered(Device d) { return Device(SIM, d.index() < 0 ? device_now : d.index()); }
  Stream getStream(Device d) const override { return Stream(Stream::UNSAFE, numbered(d), stream_now[numbered(d).index()]); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, numbered(d), 0); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::UNSAFE, numbered(d), next_stream++); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override { Stream old = getStream(s.device()); stream_now[s.device_index()] = s.id(); return old; }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  static Id id(const Stream& s) { return id_of(s.device_index(), s.id()); }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*e) *e = reinterpret_cast<void*>(next_event++);
    clocks[id(s)].join(host);
    events[reinterpret_cast<int64_t>(*e)] = clocks[id(s)];
  }
  void block(void* e, const Stream& s) const override { Lock lock(mutex); clocks[id(s)].join(events[reinterpret_cast<int64_t>(e)]); }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { Lock lock(mutex); events.erase(reinterpret_cast<int64_t>(e)); }
  void synchronizeEvent(void* e) const override { { Lock lock(mutex); host.join(events[reinterpret_cast<int64_t>(e)]); } tell("event"); }
  void synchronizeStream(const Stream& s) const override { sync_host(id(s), "stream"); }
  void synchronizeDevice(const DeviceIndex) const override { { Lock lock(mutex); for (auto& [_, clock] : clocks) host.join(clock); } tell("device"); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    Lock lock(mutex);
    auto i = blocks.find(p.get());
    if (i != blocks.end()) i->second.recorded.insert(id(s));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  void setCurrentDevice(DeviceIndex d) const override { device_now = d; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(device_now, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return pinned_at(p) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(SIM, 0); }
};

// ---- operators: the CPU's, on aliases of the same memory ----

static const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
static Tensor as_cpu(const Tensor& t, Open& open) {
  if (!t.defined() || t.device().type() != SIM) return t;
  open.add(base_of(t));
  auto* p = static_cast<char*>(base_of(t));
  if (p) p += t.storage_offset() * t.itemsize();
  auto x = at::from_blob(p, t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(c10::kCPU));
  if (t.is_conj()) x._set_conj(true);
  if (t.is_neg()) x._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) x.unsafeGetTensorImpl()->set_wrapped_number(true);
  return x;
}
static Tensor as_sim(const Tensor& x, Device device, const std::string& by) {
  c10::OptionalDeviceGuard guard(device);
  Tensor out(at::detail::empty_strided_generic(x.sizes(), x.strides(), &allocator, KEYS, x.scalar_type()));
  if (!x.numel()) return out;
  Open open;
  as_cpu(out, open).copy_(x);
  Lock lock(mutex);
  touch(base_of(out), here(device.index()), clocks[here(device.index())].at[here(device.index())], true, by);
  return out;
}
// Kernels whose result the host reads, for its shape or its value; and those that take operands of the host.
static const std::set<std::string> HOST_READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
static const std::set<std::string> MIXES = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_"};

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto& arguments = schema.arguments();
  const size_t begin = stack->size() - arguments.size();
  const std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  std::vector<std::pair<Tensor, Tensor>> resized;  // an empty ``out``, and what the CPU makes of it
  std::vector<std::pair<void*, bool>> uses;
  std::optional<Device> device;
  bool of_host = false;
  Open open;
  auto one = [&](const Tensor& t, bool writes) {
    if (!t.defined()) return t;
    if (t.device().type() != SIM) { of_host |= t.dim() && t.device().is_cpu(); return t; }
    TORCH_CHECK(!device || *device == t.device(), name, ": tensors on ", *device, " and ", t.device());
    device = t.device();
    uses.emplace_back(base_of(t), writes);
    return as_cpu(t, open);
  };
  auto converted = [&](const c10::IValue& v, bool writes) -> c10::IValue {
    if (v.isTensor()) {
      auto t = v.toTensor(), x = one(t, writes);
      if (!writes || !t.defined() || t.device().type() != SIM || t.numel() || t.dim() != 1) return x;
      resized.emplace_back(t, at::empty({0}, at::TensorOptions().dtype(t.dtype())));
      return resized.back().second;
    }
    if (v.isTensorList()) {
      std::vector<Tensor> xs;
      for (const auto& x : v.toTensorVector()) xs.push_back(one(x, writes));
      return xs;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> xs;
      for (const std::optional<Tensor> x : v.toOptionalTensorList()) xs.push_back(x ? std::make_optional(one(*x, writes)) : x);
      return xs;
    }
    if (v.isDevice() && v.toDevice().type() == SIM) { device = Guard::numbered(v.toDevice()); return Device(c10::kCPU); }
    return v;
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    (*stack)[begin + i] = converted(given[i], alias && alias->isWrite());
  }
  if (!device) device = Device(SIM, device_now);
  TORCH_CHECK(!of_host || MIXES.count(name), "Expected all tensors to be on the same device, but ", name, " got some on the CPU and some on ", *device);
  {
    Lock lock(mutex);
    const Id stream = here(device->index());
    const auto time = launch(stream);
    for (auto& [p, writes] : uses) touch(p, stream, time, writes, name);
  }
  if (HOST_READS.count(name)) sync_host(here(device->index()), name);
  op.callBoxed(stack);
  for (auto& [t, x] : resized) {
    t.unsafeGetTensorImpl()->set_storage_keep_dtype(as_sim(x.contiguous(), *device, name).storage());
    t.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.contiguous().strides(), 0);
  }
  const auto& returns = schema.returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& v = (*stack)[stack->size() - returns.size() + i];
    const auto* alias = returns[i].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t j = 0; j < arguments.size(); ++j) {
        const auto* a = arguments[j].alias_info();
        if (a && *a == *alias) { v = given[j]; break; }
      }
    } else if (v.isTensor() && v.toTensor().defined()) {
      v = as_sim(v.toTensor(), *device, name);
    } else if (v.isTensorList()) {
      std::vector<Tensor> xs;
      for (const auto& x : v.toTensorVector()) xs.push_back(as_sim(x, *device, name));
      v = xs;
    }
  }
}
using OptionalType = std::optional<at::ScalarType>; using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<Device>; using OptionalFormat = std::optional<at::MemoryFormat>;
static Tensor empty(c10::IntArrayRef size, OptionalType dtype, OptionalLayout, OptionalDevice d, std::optional<bool>, OptionalFormat format) {
  c10::OptionalDeviceGuard guard(Guard::numbered(d.value_or(Device(SIM))));
  return Tensor(at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format));
}
static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, OptionalType dtype, OptionalLayout, OptionalDevice d, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(Guard::numbered(d.value_or(Device(SIM))));
  return Tensor(at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype)));
}
static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Open open;
  auto a = as_cpu(from, open), b = as_cpu(to, open);
  const bool crosses = from.is_cpu() || to.is_cpu();
  const auto device = (from.is_cpu() ? to : from).device().index();
  const std::string by = from.is_cpu() ? "copy to the device" : to.is_cpu() ? "copy to the host" : "copy";
  auto* pin = crosses ? pinned_at((from.is_cpu() ? from : to).const_data_ptr()) : nullptr;
  {
    Lock lock(mutex);
    const Id stream = here(device);
    const auto time = launch(stream);
    if (!from.is_cpu()) touch(base_of(from), stream, time, false, by);
    if (!to.is_cpu()) touch(base_of(to), stream, time, true, by);
    if (pin && non_blocking && from.is_cpu()) pin->reads[stream] = time;
  }
  if (crosses && from.numel() && !(pin && non_blocking)) sync_host(here(device), by + (pin ? ", pinned" : ""));
  b.copy_(a);
  return to;
}
static Tensor alias_of(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset, caffe2::TypeMeta dtype) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), dtype);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return out;
}
static Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return alias_of(self, size, stride, offset.value_or(self.storage_offset()), self.dtype());
}
static Tensor view(const Tensor& self, c10::IntArrayRef size) {
  at::DimVector inferred = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return alias_of(self, inferred, *stride, self.storage_offset(), self.dtype());
}
static Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return alias_of(self, size, stride, self.storage_offset(), self.dtype());
}
static Tensor view_as_real(const Tensor& self) {
  auto size = self.sizes().vec(), stride = self.strides().vec();
  for (auto& x : stride) x *= 2;
  size.push_back(2);
  stride.push_back(1);
  return alias_of(self, size, stride, self.storage_offset() * 2, c10::scalarTypeToTypeMeta(c10::toRealValueType(self.scalar_type())));
}
static Tensor view_as_complex(const Tensor& self) {
  auto size = self.sizes().vec(), stride = self.strides().vec();
  size.pop_back();
  stride.pop_back();
  for (auto& x : stride) x /= 2;
  return alias_of(self, size, stride, self.storage_offset() / 2, c10::scalarTypeToTypeMeta(c10::toComplexType(self.scalar_type())));
}
static Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
static void record_stream(Tensor& self, Stream s) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), s); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("view_as_real", &view_as_real);
  m.impl("view_as_complex", &view_as_complex);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
}

// ---- what tests ask ----

struct Opened { Open open; Tensor alias; };  // a device tensor as one of the CPU, for as long as this lives
static int64_t pending_reads(const Tensor& t) {  // asynchronous copies of pinned memory that the host did not wait for
  auto* pin = pinned_at(t.const_data_ptr());
  Lock lock(mutex);
  int64_t count = 0;
  if (pin) for (auto& [stream, time] : pin->reads) count += !host.has(stream, time);
  return count;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("findings", [] { Lock lock(mutex); return std::exchange(findings, {}); });
  m.def("syncs", [] { Lock lock(mutex); return std::exchange(syncs, {}); });
  m.def("on_sync", [](py::object f) { on_sync = f.is_none() ? nullptr : new py::object(f); });
  m.def("device", [] { return int(device_now); });
  m.def("set_device", [](int d) { device_now = d; });
  m.def("stream", [](int d) { return stream_now[d]; });
  m.def("new_stream", [] { return next_stream++; });
  m.def("order", [](int d, StreamId first, StreamId then) { order(id_of(d, first), id_of(d, then)); });
  m.def("launch", [](int d, StreamId s, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes, const std::string& by) {
    Lock lock(mutex);
    const auto time = launch(id_of(d, s));
    for (auto& x : reads) touch(base_of(x), id_of(d, s), time, false, by);
    for (auto& x : writes) touch(base_of(x), id_of(d, s), time, true, by);
  });
  m.def("pending_reads", &pending_reads);
  py::class_<Opened>(m, "Opened")
      .def(py::init([](const Tensor& t) { auto o = std::make_unique<Opened>(); o->alias = as_cpu(t, o->open); return o; }))
      .def_readonly("alias", &Opened::alias);
}
