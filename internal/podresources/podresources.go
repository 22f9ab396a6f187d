package podresources

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// maxMessage bounds an answer: 110 pods of a node with all their devices need
// far less.
const maxMessage = 16 << 20

// Allocation is what one container holds of one resource.
type Allocation struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	Resource  string `json:"resource"`
	// Devices are the kubelet's ids, sorted.
	Devices []string `json:"devices"`
}

// List asks the kubelet that serves the pod-resources API on the unix socket.
// The result is in the kubelet's order of pods.
func List(ctx context.Context, socket string) ([]Allocation, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, fmt.Errorf("pod-resources API at %s: %w", socket, err)
	}
	defer conn.Close()
	resp, err := podresourcesapi.NewPodResourcesListerClient(conn).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("pod-resources API at %s: %w", socket, err)
	}
	var list []Allocation
	for _, pod := range resp.GetPodResources() {
		for _, c := range pod.GetContainers() {
			first := len(list)
			for _, d := range c.GetDevices() {
				// The kubelet writes one entry per NUMA node; join them again.
				i := slices.IndexFunc(list[first:], func(a Allocation) bool { return a.Resource == d.GetResourceName() })
				if i < 0 {
					list = append(list, Allocation{Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: c.GetName(), Resource: d.GetResourceName()})
					i = len(list) - 1 - first
				}
				list[first+i].Devices = append(list[first+i].Devices, d.GetDeviceIds()...)
			}
		}
	}
	for _, a := range list {
		slices.Sort(a.Devices)
	}
	return list, nil
}

// Entry is an allocation as the kubelet's device manager wrote it down.
type Entry struct {
	PodUID, Container, Resource string
	Devices                     []string
}

// Checkpoint reads the device manager's file in the device-plugins folder. A
// missing file is an empty list: the kubelet has allocated nothing yet. The
// format is the kubelet's own; a file that does not fit it is an error.
func Checkpoint(devicePlugins string) ([]Entry, error) {
	path := filepath.Join(devicePlugins, "kubelet_internal_checkpoint")
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var file struct {
		Data *struct {
			PodDeviceEntries []struct {
				PodUID, ContainerName, ResourceName string
				// DeviceIDs are by NUMA node.
				DeviceIDs map[string][]string
			}
		}
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if file.Data == nil {
		return nil, fmt.Errorf("%s: no Data: not a checkpoint of the device manager", path)
	}
	var list []Entry
	for _, e := range file.Data.PodDeviceEntries {
		entry := Entry{PodUID: e.PodUID, Container: e.ContainerName, Resource: e.ResourceName}
		for _, ids := range e.DeviceIDs {
			entry.Devices = append(entry.Devices, ids...)
		}
		slices.Sort(entry.Devices)
		list = append(list, entry)
	}
	return list, nil
}
