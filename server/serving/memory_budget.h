#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

namespace mambascope::serving {

// Bytes that explanations may hold together. A reservation gives its bytes back by its end of life,
// so no path can leak them. The budget must outlive its reservations. Threads: any.
class MemoryBudget {
 public:
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)), bytes_(other.bytes_) {}
    Reservation& operator=(Reservation&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Reservation() {
      if (budget_ != nullptr) budget_->Release(bytes_);
    }

   private:
    friend class MemoryBudget;
    Reservation(MemoryBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
    MemoryBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
  };

  explicit MemoryBudget(int64_t bytes) : total_(bytes), free_(bytes) {}

  int64_t total() const { return total_; }
  // Nothing if not enough is free.
  std::optional<Reservation> Reserve(int64_t bytes) {
    std::lock_guard lock(mu_);
    if (bytes > free_) return std::nullopt;
    free_ -= bytes;
    return Reservation(this, bytes);
  }
  int64_t free() const {
    std::lock_guard lock(mu_);
    return free_;
  }

 private:
  void Release(int64_t bytes) {
    std::lock_guard lock(mu_);
    free_ += bytes;
  }

  const int64_t total_;
  mutable std::mutex mu_;
  int64_t free_;
};

}  // namespace mambascope::serving
