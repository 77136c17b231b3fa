// Makes a CPU build of PyTorch accept tensors on "cuda:0" that have shapes alone.
//
// Autograd, views and streams ask a device guard and the hooks of CUDA which device is current.
// Here there is always one device, it is the current one, and its streams and events do nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

namespace {

const Device kOnly(c10::DeviceType::CUDA, 0);

struct ImaginaryGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return kOnly; }
  Device exchangeDevice(Device) const override { return kOnly; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct ImaginaryHooks final : at::CUDAHooksInterface {
  explicit ImaginaryHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

ImaginaryGuard guard;

}  // namespace

namespace at {
// PyTorch makes its hooks from this registry when it first needs them.
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ImaginaryHooks)
}  // namespace at

extern "C" void add_imaginary_device() {
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &guard);
}
