// A GPU whose kernels compute on the CPU: torch's own `cuda` device type in a build of torch without CUDA.
//
// Memory is filled with NaN when it is handed out and when it is given back. Tensors of two devices in one operator are
// an error, as are generators of another device; what would wait for the device is one in sync-debug mode. A
// non-blocking copy into page-locked memory arrives when somebody waits for the device, and not before. Streams run in
// the order of the host: what races between them is not seen here (tests/races looks for that).

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

using at::Tensor;
static int n_devices() {
  static int n = [] {
    auto* e = getenv("SIMULATED_GPUS");
    return e ? atoi(e) : 2;
  }();
  return n;
}
static thread_local int current_device_ = 0;
static thread_local int64_t current_stream_[8] = {0};
static std::mutex lock_;
static std::map<char*, size_t> pinned_;
static thread_local int internal_ = 0;
static int sync_mode_ = 0;  // 2: error
static int64_t allocated_[8], peak_[8];
static bool noting_ = false;
static std::vector<int64_t> changes_;  // of memory, while it is noted: bytes (negative: given back), address, stream
struct Internal {
  Internal() { ++internal_; }
  ~Internal() { --internal_; }
};

// ----------------------------------------------------------------------------------------- deferred copies to the host
struct Deferred {
  Tensor target, value;
  int64_t stream;
  uint64_t number;
};
static std::recursive_mutex deferred_lock_;
static std::deque<Deferred> deferred_;
static uint64_t counter_ = 0;
static void flush(uint64_t upto = ~0ull, int64_t stream = -1) {
  std::lock_guard<std::recursive_mutex> g(deferred_lock_);
  Internal i;
  c10::InferenceMode no(false);
  std::deque<Deferred> rest;
  while (!deferred_.empty()) {
    auto d = deferred_.front();
    deferred_.pop_front();
    if (d.number <= upto) {
      at::AutoDispatchBelowADInplaceOrView b;
      d.target.copy_(d.value);
    } else
      rest.push_back(d);
  }
  deferred_ = rest;
}
static void syncs(const char* what) {
  if (internal_) return;
  flush();
  TORCH_CHECK(sync_mode_ != 2, "called a synchronizing CUDA operation: ", what);
}

// -------------------------------------------------------------------------------------------------------------- memory
struct Alloc final : c10::Allocator {
  struct Head {
    size_t n;
    int64_t dev;
    char pad[48];
  };
  c10::DataPtr allocate(size_t n) override {
    int d = current_device_;
    if (!n) return {nullptr, nullptr, &drop, c10::Device(c10::kCUDA, d)};
    size_t r = (n + 511) / 512 * 512;
    char* raw = (char*)aligned_alloc(64, (r + sizeof(Head) + 63) / 64 * 64);
    auto* h = (Head*)raw;
    h->n = r;
    h->dev = d;
    memset(raw + sizeof(Head), 0xFF, r);
    {
      std::lock_guard<std::mutex> g(lock_);
      allocated_[d] += r;
      peak_[d] = std::max(peak_[d], allocated_[d]);
      if (noting_) changes_.insert(changes_.end(), {(int64_t)r, (int64_t)raw, current_stream_[d]});
    }
    return {raw + sizeof(Head), raw, &drop, c10::Device(c10::kCUDA, d)};
  }
  static void drop(void* raw) {
    if (!raw) return;
    auto* h = (Head*)raw;
    {
      std::lock_guard<std::mutex> g(lock_);
      allocated_[h->dev] -= h->n;
      if (noting_) changes_.insert(changes_.end(), {-(int64_t)h->n, (int64_t)raw, 0});
    }
    memset((char*)raw + sizeof(Head), 0xFF, std::min<size_t>(h->n, 1 << 16));
    free(raw);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
};
static Alloc alloc_;
REGISTER_ALLOCATOR(c10::kCUDA, &alloc_);

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &drop, c10::Device(c10::kCPU)};
    char* p = (char*)aligned_alloc(64, (n + 63) / 64 * 64);
    std::lock_guard<std::mutex> g(lock_);
    pinned_[p] = n;
    return {p, p, &drop, c10::Device(c10::kCPU)};
  }
  static void drop(void* p) {
    if (!p) return;
    flush();
    {
      std::lock_guard<std::mutex> g(lock_);
      pinned_.erase((char*)p);
    }
    free(p);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
};
static Pinned pinned_alloc_;
static bool is_pinned(const void* q) {
  std::lock_guard<std::mutex> g(lock_);
  auto it = pinned_.upper_bound((char*)q);
  if (it == pinned_.begin()) return false;
  --it;
  return (char*)q < it->first + it->second;
}

// --------------------------------------------------------------------------------------------------------------- guard
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto o = getDevice();
    setDevice(d);
    return o;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, (c10::DeviceIndex)current_device_}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < n_devices(), "invalid device ordinal ", d);
    if (d.index() >= 0) current_device_ = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device_ = d.index();
  }
  c10::Stream getStream(c10::Device d) const override {
    int i = d.index() < 0 ? current_device_ : d.index();
    return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, (c10::DeviceIndex)i}, current_stream_[i]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static int64_t n = 100;
    int i = d.index() < 0 ? current_device_ : d.index();
    return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, (c10::DeviceIndex)i}, ++n);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto o = getStream(s.device());
    current_stream_[s.device_index()] = s.id();
    return o;
  }
  void record(void** e, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*e) *e = malloc(1);
  }
  void destroyEvent(void* e, c10::DeviceIndex) const noexcept override { free(e); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return n_devices(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { flush(); }
  void synchronizeEvent(void*) const override { flush(); }
  void synchronizeDevice(c10::DeviceIndex) const override { flush(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ----------------------------------------------------------------------------------------------------------- generator
struct Gen final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Gen(int i)
      : c10::GeneratorImpl({c10::kCUDA, (c10::DeviceIndex)i}, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t s) override { inner.set_current_seed(s); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& s) override { inner.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* g = new Gen(device().index());
    g->inner = inner.clone();
    return g;
  }
};
static at::Generator& default_generator(int i) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> v;
    for (int k = 0; k < 8; ++k) v.push_back(at::Generator(c10::make_intrusive<Gen>(k)));
    return v;
  }();
  return all[i < 0 ? current_device_ : i];
}

// --------------------------------------------------------------------------------------------------------------- hooks
namespace at {
struct Hooks final : CUDAHooksInterface {
  Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  static inline bool give_default = false;
  Generator getNewGenerator(DeviceIndex i) const override {
    if (give_default) return default_generator(i);
    return Generator(c10::make_intrusive<Gen>(i < 0 ? current_device_ : i));
  }
  Device getDeviceFromPtr(void*) const override { return Device(c10::kCUDA, current_device_); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_alloc_; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current_device_; }
  DeviceIndex deviceCount() const override { return n_devices(); }
  void setCurrentDevice(DeviceIndex d) const override { current_device_ = d; }
  DeviceIndex getCurrentDevice() const override { return current_device_; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto o = current_device_;
    current_device_ = d;
    return o;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  Allocator* getCUDADeviceAllocator() const override { return &alloc_; }
  int getNumGPUs() const override { return n_devices(); }
  void deviceSynchronize(DeviceIndex) const override { flush(); }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);
}  // namespace at

// ------------------------------------------------------------------------------------------------------------- kernels
static Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dt, std::optional<at::Layout>,
                    std::optional<at::Device> dev, std::optional<bool>, std::optional<at::MemoryFormat> mf) {
  Guard g;
  auto d = dev.value_or(g.getDevice());
  auto old = g.getDevice();
  g.setDevice(d);
  auto t = at::detail::empty_generic(size, &alloc_, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                     c10::dtype_or_default(dt), mf);
  g.setDevice(old);
  return t;
}
static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dt,
                            std::optional<at::Layout>, std::optional<at::Device> dev, std::optional<bool>) {
  Guard g;
  auto d = dev.value_or(g.getDevice());
  auto old = g.getDevice();
  g.setDevice(d);
  auto t = at::detail::empty_strided_generic(size, stride, &alloc_, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                             c10::dtype_or_default(dt));
  g.setDevice(old);
  return t;
}
static Tensor on_cpu(const Tensor& t) {  // shares the memory
  if (!t.is_cuda()) return t;
  auto keep = t;
  auto c = at::from_blob(
      t.data_ptr(), t.sizes(), t.strides(), [keep](void*) {}, at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
  if (t.is_conj()) c = c.conj();
  if (t.is_neg()) c = at::_neg_view(c);
  return c;
}
static Tensor& copy(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.numel() == 0 && src.numel() == 0) return self;
  bool down = !self.is_cuda() && src.is_cuda(), up = self.is_cuda() && !src.is_cuda();
  if (up || down) {
    if (!non_blocking) syncs(down ? "copy to the host" : "copy to the device");
  }
  if (up) flush();
  if (down && non_blocking && !internal_ && is_pinned(self.data_ptr())) {
    Internal i;
    at::AutoDispatchBelowADInplaceOrView b;
    auto value = on_cpu(src).clone();
    std::lock_guard<std::recursive_mutex> g(deferred_lock_);
    deferred_.push_back({self.detach(), value, current_stream_[0], ++counter_});
    return self;
  }
  if (down && !internal_) flush();
  at::AutoDispatchBelowADInplaceOrView b;
  Internal i;
  on_cpu(self).copy_(on_cpu(src));
  return self;
}
static Tensor copy_and_resize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) const_cast<Tensor&>(dst).resize_(self.sizes());
  Internal i;
  Tensor d = dst;
  copy(d, self, false);
  return dst;
}
static at::Scalar item(const Tensor& t) {
  syncs("item");
  Internal i;
  return on_cpu(t).item();
}
static Tensor& set_nothing(Tensor& t) {
  return t.set_(c10::Storage(c10::Storage::use_byte_size_t(), 0, &alloc_, true), 0, {0}, {1});
}
static Tensor& set_storage(Tensor& t, c10::Storage s) {
  int64_t n = s.nbytes() / t.itemsize();
  return t.set_(s, 0, {n}, {1});
}
static const Tensor& resize(const Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat> mf) {
  Guard g;
  auto old = g.getDevice();
  g.setDevice(t.device());
  auto& r = at::native::resize_(t, size, mf);
  g.setDevice(old);
  return r;
}
static void record_stream(Tensor&, c10::Stream) {}

static const std::set<std::string> waiting = {"aten::nonzero",           "aten::equal",      "aten::masked_select",
                                              "aten::_unique2",          "aten::unique_dim", "aten::unique_consecutive",
                                              "aten::repeat_interleave", "aten::is_nonzero", "aten::bincount",
                                              "aten::nonzero.out"};
static const std::set<std::string> lenient = {
    "aten::index.Tensor", "aten::index_put_",    "aten::_index_put_impl_",
    "aten::index",        "aten::_unsafe_index", "aten::_pack_padded_sequence",
    "aten::ctc_loss",     "aten::_ctc_loss",     "aten::_ctc_loss_backward"};

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& args = schema.arguments();
  auto begin = stack->size() - args.size();
  c10::optional<at::Device> dev;
  auto look = [&](const Tensor& t) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      if (dev.has_value())
        TORCH_CHECK(*dev == t.device(), "Expected all tensors to be on the same device, but found ", *dev, " and ",
                    t.device(), " in ", schema.name());
      dev = t.device();
    }
  };
  auto bad = [&](const Tensor& t, bool written) {
    if (!t.defined() || t.is_cuda() || internal_) return;
    if (lenient.count(schema.name()) && !written) return;
    TORCH_CHECK(t.dim() == 0 && !written && schema.name().find("_fused_") == std::string::npos &&
                    schema.name().find("_amp_") == std::string::npos,
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
                t.device(), "! (when checking argument in ", schema.name(), ")");
  };
  for (int pass = 0; pass < 2; ++pass)
    for (size_t k = 0; k < args.size(); ++k) {
      auto& v = (*stack)[begin + k];
      bool written = args[k].alias_info() && args[k].alias_info()->isWrite();
      if (v.isTensor()) {
        pass ? bad(v.toTensor(), written) : look(v.toTensor());
      } else if (v.isTensorList()) {
        for (const auto& t : v.toTensorVector()) pass ? bad(t, written) : look(t);
      } else if (v.isList() && pass == 0) {
        for (const auto& e : v.toListRef())
          if (e.isTensor()) look(e.toTensor());
      }
    }
  for (size_t k = 0; k < args.size(); ++k) {
    auto& v = (*stack)[begin + k];
    auto type = args[k].type();
    bool gen = type->str().find("Generator") != std::string::npos;
    if (gen) {
      if (v.isNone())
        v = static_cast<Gen*>(default_generator(dev ? dev->index() : -1).unsafeGetGeneratorImpl())->inner;
      else {
        auto g = v.toGenerator();
        if (!internal_) {
          TORCH_CHECK(g.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
          v = static_cast<Gen*>(g.unsafeGetGeneratorImpl())->inner;
        }
      }
    }
  }
  if (waiting.count(schema.name())) syncs(schema.name().c_str());
  Guard g;
  auto old = g.getDevice();
  if (dev) g.setDevice(*dev);
  Internal i;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    g.setDevice(old);
    throw;
  }
  g.setDevice(old);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& t, c10::Storage s, int64_t o, c10::IntArrayRef sz, c10::IntArrayRef st) -> Tensor& {
           return at::native::set_storage_cpu_(t, s, o, sz, st);
         });
  m.impl("set_.source_Tensor", [](Tensor& t, const Tensor& s) -> Tensor& { return at::native::set_tensor_(t, s); });
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_", &set_nothing);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("resize_", &resize);
  m.impl("copy_", &copy);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice",
         [](const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
            std::optional<double>, bool) -> int64_t { return 0; });
}

extern "C" {
void gpu_give_default(int v) { at::Hooks::give_default = v; }
int gpu_count() { return n_devices(); }
int gpu_device() { return current_device_; }
void gpu_set_device(int d) { current_device_ = d; }
int64_t gpu_stream(int d) { return current_stream_[d]; }
void gpu_set_stream(int d, int64_t s) { current_stream_[d] = s; }
void gpu_flush() { flush(); }
uint64_t gpu_counter() { return counter_; }
void gpu_flush_to(uint64_t n) { flush(n); }
int64_t gpu_pending(uint64_t n) {
  std::lock_guard<std::recursive_mutex> g(deferred_lock_);
  int64_t k = 0;
  for (auto& d : deferred_) k += d.number <= n;
  return k;
}
int64_t gpu_allocated(int d) { return allocated_[d]; }
int64_t gpu_peak(int d) { return peak_[d]; }
void gpu_note(int on) { noting_ = on; }
int64_t gpu_changes() { return changes_.size(); }
int64_t gpu_change(int64_t i) { return changes_[i]; }
void gpu_reset_peak(int d) { peak_[d] = allocated_[d]; }
void gpu_sync_mode(int m) { sync_mode_ = m; }
int gpu_register(char* p, size_t n) {
  std::lock_guard<std::mutex> g(lock_);
  if (pinned_.count(p)) return 712;
  pinned_[p] = n;
  return 0;
}
int gpu_unregister(char* p) {
  flush();
  std::lock_guard<std::mutex> g(lock_);
  return pinned_.erase(p) ? 0 : 713;
}
void gpu_seed(int d, uint64_t s) { default_generator(d).set_current_seed(s); }
uint64_t gpu_initial_seed(int d) { return default_generator(d).current_seed(); }
}
TORCH_LIBRARY(simulated_gpu, m) {
  m.def("storage_resize(Tensor t, int n) -> ()",
        [](const Tensor& t, int64_t n) { at::native::resize_bytes_cpu(t.storage().unsafeGetStorageImpl(), n); });
}
