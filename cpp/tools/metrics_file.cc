#include "metrics_file.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <utility>

namespace jaxrec::serving {
namespace {

constexpr std::chrono::seconds kInterval{5};

}  // namespace

MetricsFile::MetricsFile(std::string path, std::function<std::string()> metrics)
    : path_(std::move(path)), metrics_(std::move(metrics)) {
  write();
  thread_ = std::thread([this] {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, kInterval, [this] { return is_closing_; })) write_again();
  });
}

MetricsFile::~MetricsFile() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
  write_again();
}

void MetricsFile::write() const {
  const std::string unfinished = path_ + ".unfinished";
  std::ofstream file(unfinished, std::ios::binary);
  file << metrics_();
  file.close();
  if (!file || std::rename(unfinished.c_str(), path_.c_str()) != 0) {
    throw std::runtime_error(path_ + ": " + std::strerror(errno));
  }
}

// A disk that is full for a while does not end the answers.
void MetricsFile::write_again() {
  try {
    write();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "jaxrec_predict: the metrics cannot be written: %s\n", error.what());
  }
}

}  // namespace jaxrec::serving
