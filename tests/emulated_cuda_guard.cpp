// What C++ must hold for CUDA that autograd runs on emulated tensors: eight devices, a current one and streams by thread.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>

using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 8; }
  int getNumGPUs() const override { return 8; }
  DeviceIndex current_device() const override { return Guard::getDeviceIndex(); }
  DeviceIndex getCurrentDevice() const override { return Guard::getDeviceIndex(); }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

extern "C" {
int emulated_device() { return Guard::getDeviceIndex(); }
void emulated_set_device(int index) { Guard::setDeviceIndex(index); }
long emulated_stream(int index) { return Guard::getCurrentStreamIdFor(index); }
void emulated_set_stream(int index, long id) {
  Guard().exchangeStream(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, index), id));
}
}
