#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

namespace mambascope {

// A fixed-size array of trivially destructible T on a 64-byte boundary (one cache line, one
// AVX-512 register), left uninitialised: scratch for kernels. Owns its memory; move only.
template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(size_t size) : size_(size) {
    if (size == 0) return;
    const size_t bytes = (size * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    data_.reset(static_cast<T*>(memory));
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) { return data_.get()[i]; }
  const T& operator[](size_t i) const { return data_.get()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  operator std::span<T>() { return {data(), size_}; }  // NOLINT: views are meant to be easy
  operator std::span<const T>() const { return {data(), size_}; }  // NOLINT

  // At least `size` elements; contents are lost when it grows.
  void Reserve(size_t size) {
    if (size > size_) *this = Array(size);
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

}  // namespace mambascope
