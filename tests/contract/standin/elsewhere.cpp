// A device of its own for tests: memory of this machine under another name. Tensors on it don't mix with those of the CPU,
// as on a GPU; what is computed there is copied to the CPU, computed and copied back.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return {KIND, 0}; }
  c10::Device getDevice() const override { return {KIND, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(KIND, 0)); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(KIND, 0)); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(KIND, 0)); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    return {data, data, &c10::free_cpu, {KIND, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the CPU.
at::Tensor here(const at::Tensor& t) {
  if (t.device().is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [keep = t](void*) {},
                       at::TensorOptions().dtype(t.dtype()).device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  here(to).copy_(here(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  here(to).copy_(here(from));
  return to;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_source(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::cpu::set_(self, source, 0, {size}, {1});
}

void elsewhere(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&elsewhere>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", set_whole);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

// Autocast, for the products of a forward.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}
