// An allocator for torch.cuda.memory.CUDAPluggableAllocator that puts a band of 4 KiB on each side of every allocation,
// fills bands and memory with NaN, and looks at the bands when memory is freed and when it is asked to.
//
// The pattern is 0xFF in every byte: NaN in bf16, fp16, fp32 and e4m3, -1 in integers, and not the NaN that a CUDA kernel
// computes (0x7FFF...), so that a kernel which reads a band and stores what it made of it is seen.
//
// No header of CUDA is needed: the functions of the runtime that the process has loaded are found by name. What a
// library gets from cudaMalloc itself does not pass through here.
#include <dlfcn.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int64_t kBand = 4096;
constexpr int kPattern = 0xFF;
constexpr int kDeviceToHost = 2;  // cudaMemcpyDeviceToHost

struct Runtime {
  int (*allocate)(void **, size_t);
  int (*release)(void *);
  int (*fill)(void *, int, size_t);
  int (*copy)(void *, const void *, size_t, int);
  int (*synchronize)();
  int (*get_device)(int *);
  int (*set_device)(int);
} runtime;

struct Allocation {
  int64_t number;  // in the order of allocation, from 1
  int64_t size;
  int device;
};

// One band that is not what it was. side: 0 before the allocation, 1 behind it. nearest: bytes between the allocation and
// the nearest byte that was written over.
struct Damage {
  int64_t number, size, side, bytes, nearest;
};

std::mutex mutex;
std::map<char *, Allocation> live;  // by the address that was handed out
std::vector<Damage> damages;
int64_t allocations = 0;
int64_t unread = 0;  // bands that could not be read

// The device of an allocation is the current one for as long as this lives.
class On {
 public:
  explicit On(int device) {
    if (runtime.get_device(&before_) == 0 && before_ != device) changed_ = runtime.set_device(device) == 0;
  }
  ~On() {
    if (changed_) runtime.set_device(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

void check_band(const char *start, const Allocation &of, int64_t side) {
  std::vector<unsigned char> band(kBand);
  if (runtime.copy(band.data(), start, kBand, kDeviceToHost) != 0) {
    ++unread;
    return;
  }
  Damage found{of.number, of.size, side, 0, kBand};
  for (int64_t i = 0; i < kBand; ++i) {
    if (band[i] == kPattern) continue;
    const int64_t away = side == 0 ? kBand - 1 - i : i;
    if (away < found.nearest) found.nearest = away;
    ++found.bytes;
  }
  if (found.bytes == 0) return;
  damages.push_back(found);
  runtime.fill(const_cast<char *>(start), kPattern, kBand);  // each damage is reported once
}

void check(char *address, const Allocation &allocation) {
  const On device(allocation.device);
  if (runtime.synchronize() != 0) {
    unread += 2;
    return;
  }
  check_band(address - kBand, allocation, 0);
  check_band(address + allocation.size, allocation, 1);
}

}  // namespace

extern "C" {

// Use the CUDA runtime at this path, which the process has loaded. 0, or 1 where it is not what it should be.
int guards_open(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return 1;
  runtime.allocate = reinterpret_cast<int (*)(void **, size_t)>(dlsym(library, "cudaMalloc"));
  runtime.release = reinterpret_cast<int (*)(void *)>(dlsym(library, "cudaFree"));
  runtime.fill = reinterpret_cast<int (*)(void *, int, size_t)>(dlsym(library, "cudaMemset"));
  runtime.copy = reinterpret_cast<int (*)(void *, const void *, size_t, int)>(dlsym(library, "cudaMemcpy"));
  runtime.synchronize = reinterpret_cast<int (*)()>(dlsym(library, "cudaDeviceSynchronize"));
  runtime.get_device = reinterpret_cast<int (*)(int *)>(dlsym(library, "cudaGetDevice"));
  runtime.set_device = reinterpret_cast<int (*)(int)>(dlsym(library, "cudaSetDevice"));
  const bool whole = runtime.allocate && runtime.release && runtime.fill && runtime.copy && runtime.synchronize &&
                     runtime.get_device && runtime.set_device;
  return whole ? 0 : 1;
}

// Throws where the device has no memory left or has failed: torch makes a RuntimeError of it.
void *guards_alloc(ssize_t size, int device, void *) {
  const std::lock_guard<std::mutex> lock(mutex);
  const On current(device);
  void *start = nullptr;
  const int64_t whole = size + 2 * kBand;
  int error = runtime.allocate(&start, whole);
  if (error == 0) error = runtime.fill(start, kPattern, whole);
  if (error == 0) error = runtime.synchronize();  // other streams do not wait for the one that fills
  if (error != 0) {
    throw std::runtime_error("CUDA error: " + std::to_string(error) + " in a guarded allocation of " + std::to_string(size) +
                             " bytes");
  }
  char *address = static_cast<char *>(start) + kBand;
  live[address] = {++allocations, size, device};
  return address;
}

void guards_free(void *pointer, ssize_t, int, void *) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = live.find(static_cast<char *>(pointer));
  if (found == live.end()) return;
  check(found->first, found->second);
  const On device(found->second.device);
  runtime.release(found->first - kBand);
  live.erase(found);
}

// Look at the bands of everything that is not freed.
void guards_check() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto &[address, allocation] : live) check(address, allocation);
}

int64_t guards_allocations() { return allocations; }

int64_t guards_unread() { return unread; }

// The number of the allocation that holds an address, 0 where none does.
int64_t guards_number(const void *pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto next = live.upper_bound(const_cast<char *>(static_cast<const char *>(pointer)));
  if (next == live.begin()) return 0;
  const auto &[address, allocation] = *--next;
  const bool inside = static_cast<const char *>(pointer) < address + (allocation.size > 0 ? allocation.size : 1);
  return inside ? allocation.number : 0;
}

// How many bands were damaged; the first `capacity` of them are written to `into`.
int64_t guards_damages(Damage *into, int64_t capacity) {
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t count = static_cast<int64_t>(damages.size());
  for (int64_t i = 0; i < count && i < capacity; ++i) into[i] = damages[i];
  return count;
}
}
