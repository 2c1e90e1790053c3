// A file of metrics, which a collector such as Prometheus' node exporter reads.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace jaxrec::serving {

// Writes the file every few seconds, and a last time at the end. It is replaced at once, so that no
// reader sees a part of it.
class MetricsFile {
 public:
  // Throws std::runtime_error where the file cannot be written.
  MetricsFile(std::string path, std::function<std::string()> metrics);
  ~MetricsFile();

 private:
  void write() const;
  void write_again();

  const std::string path_;
  const std::function<std::string()> metrics_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace jaxrec::serving
